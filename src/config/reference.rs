//! `train config-reference`: every key with its default, type and doc.

use std::fmt::Write;

use super::schema::{Kind, Schema};

/// A TOML file that holds every key at its default. Keys without a default are commented out, so
/// it loads as it stands.
pub fn reference() -> String {
    let schema = Schema::get();
    let mut out = String::from(
        "# Every key of the config, at its default.\n\
         # TRAIN__SECTION__KEY in the environment wins over the file, --set section.key=value over both.\n",
    );
    for section in &schema.sections {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "\n# {}", section.doc.replace('\n', "\n# "));
        if section.optional {
            let _ = writeln!(out, "# [{}]  # optional", section.path);
        } else {
            let _ = writeln!(out, "[{}]", section.path);
        }
        for key in schema.keys.iter().filter(|k| k.section() == section.path) {
            let _ = writeln!(out, "\n# {}", key.doc.replace('\n', "\n# "));
            if let Kind::OneOf(variants) = &key.kind {
                for variant in variants.iter().filter(|v| !v.doc.is_empty()) {
                    let _ = writeln!(out, "#   {:?}: {}", variant.name, variant.doc);
                }
            }
            let expected = key.kind.expected();
            let _ = match &key.default {
                Some(default) => writeln!(out, "{} = {default}  # {expected}", key.name()),
                None if key.optional => {
                    writeln!(out, "# {} =  # absent by default; {expected}", key.name())
                }
                None => writeln!(out, "# {} =  # required; {expected}", key.name()),
            };
        }
    }
    out
}
