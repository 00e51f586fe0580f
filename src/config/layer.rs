//! One source of values: the file, an environment variable or a `--set`.

use figment::value::{Dict, Map, Value};
use figment::{Metadata, Profile, Provider};
use serde::Deserialize;

use super::schema::{Kind, Schema};
use crate::{Error, Result};

/// Environment variables of this prefix are config keys.
pub(super) const ENV_PREFIX: &str = "TRAIN__";

/// Values with the name of where they came from.
pub(super) struct Layer {
    /// For messages: a path, a variable's name, "--set".
    pub source: String,
    /// The TOML text, when there is one to find lines in.
    pub text: Option<String>,
    values: Dict,
}

impl Provider for Layer {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.source.clone())
    }

    fn data(&self) -> figment::Result<Map<Profile, Dict>> {
        Ok(Profile::Default.collect(self.values.clone()))
    }
}

impl Layer {
    /// The content of a TOML file called `source`.
    pub fn file(source: String, text: String) -> Result<Self> {
        let values = toml::from_str(&text)
            .map_err(|e| Error::Config(format!("{source} is not valid TOML: {e}")))?;
        let layer = Self {
            source,
            text: Some(text),
            values,
        };
        layer.check_keys(&layer.values, "")?;
        Ok(layer)
    }

    /// The environment variable `name`, which starts with [`ENV_PREFIX`].
    pub fn env(name: String, raw: &str) -> Result<Self> {
        let path = name[ENV_PREFIX.len()..].to_lowercase().replace("__", ".");
        Self::single(format!("environment variable {name}"), &path, raw)
    }

    /// `key=value` of a `--set`.
    pub fn set(argument: &str) -> Result<Self> {
        let (path, raw) = argument.split_once('=').ok_or_else(|| {
            Error::Config(format!(
                "--set {argument:?} has no value: write --set section.key=value"
            ))
        })?;
        Self::single("--set".into(), path.trim(), raw)
    }

    fn single(source: String, path: &str, raw: &str) -> Result<Self> {
        let schema = Schema::get();
        let value = match schema.key(path) {
            Some(key) => typed(&key.kind, raw),
            // A whole section, as an inline table.
            None => parse(raw).unwrap_or_else(|| Value::from(raw)),
        };
        let mut layer = Self {
            source,
            text: None,
            values: Dict::new(),
        };
        if schema.key(path).is_none() && schema.section(path).is_none() {
            return Err(layer.unknown(path));
        }
        layer.values = figment::util::nest(path, value)
            .into_dict()
            .unwrap_or_default();
        layer.check_keys(&layer.values, "")?;
        Ok(layer)
    }

    /// Fails on a key that the schema does not know.
    fn check_keys(&self, values: &Dict, prefix: &str) -> Result<()> {
        let schema = Schema::get();
        for (name, value) in values {
            let path = match prefix {
                "" => name.clone(),
                prefix => format!("{prefix}.{name}"),
            };
            if schema.section(&path).is_some() {
                // A section that is not a table is a wrong type, which figment reports.
                if let Some(inner) = value.as_dict() {
                    self.check_keys(inner, &path)?;
                }
            } else if schema.key(&path).is_none() {
                return Err(self.unknown(&path));
            }
        }
        Ok(())
    }

    fn unknown(&self, path: &str) -> Error {
        let schema = Schema::get();
        let hint = match schema.nearest(path) {
            Some(near) => format!("did you mean {near}?"),
            None => match path.rsplit_once('.') {
                Some((section, _)) if schema.section(section).is_some() => {
                    let keys = schema.keys.iter().filter(|k| k.section() == section);
                    let names: Vec<&str> = keys.map(|k| k.name()).collect();
                    format!("[{section}] has {}", names.join(", "))
                }
                _ => {
                    let names: Vec<String> = schema
                        .sections
                        .iter()
                        .map(|s| format!("[{}]", s.path))
                        .collect();
                    format!("sections are {}", names.join(" "))
                }
            },
        };
        Error::Config(format!("unknown key {path} ({}); {hint}", self.place(path)))
    }

    /// The source, with the line of `path` where there are lines.
    pub fn place(&self, path: &str) -> String {
        match self.text.as_deref().and_then(|text| line_of(text, path)) {
            Some(line) => format!("{}:{line}", self.source),
            None => self.source.clone(),
        }
    }
}

/// A raw value as the type of its key has it. What does not fit stays text, so that the error
/// about the wrong type shows it.
fn typed(kind: &Kind, raw: &str) -> Value {
    match kind {
        kind if kind.is_textual() => Value::from(raw),
        Kind::List(item) if item.is_textual() => match parse(raw) {
            Some(list @ Value::Array(..)) => list,
            Some(Value::String(_, quoted)) => Value::from(vec![quoted]),
            _ if raw.trim_start().starts_with('[') => Value::from(raw),
            _ => Value::from(vec![raw]),
        },
        _ => parse(raw).unwrap_or_else(|| Value::from(raw)),
    }
}

fn parse(raw: &str) -> Option<Value> {
    let parser = toml::de::ValueDeserializer::new(raw.trim());
    let value = toml::Value::deserialize(parser).ok()?;
    Value::serialize(value).ok()
}

/// The line (from 1) on which `path`, or the nearest table around it, is set.
fn line_of(text: &str, path: &str) -> Option<usize> {
    let document = toml_edit::ImDocument::parse(text).ok()?;
    let mut table: &dyn toml_edit::TableLike = document.as_table();
    let mut start = None;
    for name in path.split('.') {
        let Some((key, item)) = table.get_key_value(name) else {
            break;
        };
        start = key.span().or(item.span()).map(|span| span.start).or(start);
        match item.as_table_like() {
            Some(inner) => table = inner,
            None => break,
        }
    }
    Some(text.get(..start?)?.matches('\n').count() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_in_every_way_to_write_a_key() {
        let text = "model.d_model = 1\n[lr]\npeak = 1.0\n\n[data]\nshards = { train = \"a\" }\n\
                    [train]\nsteps = 1\n";
        assert_eq!(line_of(text, "model.d_model"), Some(1));
        assert_eq!(line_of(text, "lr.peak"), Some(3));
        assert_eq!(line_of(text, "data.shards.train"), Some(6));
        assert_eq!(line_of(text, "train.steps"), Some(8));
        assert_eq!(line_of(text, "train.absent"), Some(7));
        assert_eq!(line_of(text, "absent"), None);
    }

    #[test]
    fn raw_values_take_the_type_of_their_key() {
        let text = || Kind::List(Box::new(Kind::Text));
        assert_eq!(typed(&Kind::Text, "123").as_str(), Some("123"));
        assert_eq!(
            typed(&Kind::Float { single: true }, "5e-5").to_actual(),
            figment::error::Actual::Float(5e-5)
        );
        assert_eq!(typed(&Kind::Bool, " true ").to_bool(), Some(true));
        assert_eq!(
            typed(&Kind::Int { unsigned: true }, "many").as_str(),
            Some("many")
        );
        let list = |raw| {
            let items = typed(&text(), raw).into_array().expect(raw);
            let items = items.into_iter().map(|v| v.into_string().expect(raw));
            items.collect::<Vec<_>>()
        };
        assert_eq!(list("a.txt"), ["a.txt"]);
        assert_eq!(list(r#"["a", "b c"]"#), ["a", "b c"]);
        assert_eq!(list("123"), ["123"]);
        assert_eq!(list("\"a\""), ["a"]);
        assert!(typed(&text(), "[a, b").as_str().is_some());
    }
}
