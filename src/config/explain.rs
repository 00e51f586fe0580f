//! figment's errors in the user's words: key, value, source, and what would be right.

use figment::error::Kind as Fault;
use figment::value::Value;
use figment::{Figment, Metadata};

use super::layer::Layer;
use super::schema::Schema;
use crate::Error;

/// Turns the first of figment's errors into ours.
pub(super) fn explain(error: figment::Error, figment: &Figment, layers: &[Layer]) -> Error {
    let schema = Schema::get();
    let mut path = error.path.join(".");
    if let Fault::MissingField(name) = &error.kind {
        path = [path.as_str(), name].join(".");
        let place = place(error.metadata.as_ref(), layers, &path);
        let expected = schema
            .key(&path)
            .map_or_else(String::new, |k| k.kind.expected());
        return Error::Config(format!("{path} is missing ({place}): give it {expected}"));
    }
    // An error inside a list names the item: the key is the part that the schema knows.
    let mut key = path.as_str();
    while schema.key(key).is_none() && schema.section(key).is_none() {
        match key.rsplit_once('.') {
            Some((parent, _)) => key = parent,
            None => break,
        }
    }
    let expected = if let Some(known) = schema.key(key) {
        known.kind.expected()
    } else if schema.section(key).is_some() {
        format!("a table [{key}]")
    } else {
        // Nothing of ours: figment's own words are all there is.
        return Error::Config(error.to_string());
    };
    let place = place(error.metadata.as_ref(), layers, key);
    let found = figment
        .find_value(key)
        .map_or_else(|_| "?".into(), |v| show(&v));
    Error::Config(format!("{key} = {found} ({place}): expected {expected}"))
}

/// Where each key that is not at its default was set.
#[derive(Default)]
pub(super) struct Origins(Vec<(&'static str, String)>);

impl Origins {
    /// Reads them off the merged sources.
    pub fn new(figment: &Figment, layers: &[Layer]) -> Self {
        let keys = Schema::get().keys.iter().map(|key| key.path.as_str());
        let origins = keys.filter_map(|key| {
            let metadata = figment.find_metadata(key)?;
            Some((key, place(Some(metadata), layers, key)))
        });
        Self(origins.collect())
    }

    /// A finding with the origins of the keys it speaks of.
    pub fn annotate(&self, finding: &str) -> String {
        let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
        let words: Vec<&str> = finding.split(|c: char| !is_word(c)).collect();
        let spoken_of = self.0.iter().filter(|(key, _)| words.contains(key));
        let set: Vec<String> = spoken_of
            .map(|(key, place)| format!("{key} from {place}"))
            .collect();
        match set.as_slice() {
            [] => finding.to_owned(),
            set => format!("{finding} ({})", set.join(", ")),
        }
    }
}

fn place(metadata: Option<&Metadata>, layers: &[Layer], path: &str) -> String {
    let Some(metadata) = metadata else {
        return "default".into();
    };
    // The last layer of a name wins, as it does in the merge.
    match layers
        .iter()
        .rev()
        .find(|l| l.source == metadata.name.as_ref())
    {
        Some(layer) => layer.place(path),
        None => metadata.name.to_string(),
    }
}

fn show(value: &Value) -> String {
    match serde_json::to_string(value) {
        Ok(text) if text.chars().count() <= 80 => text,
        Ok(text) => text.chars().take(77).chain("...".chars()).collect(),
        Err(_) => "?".into(),
    }
}
