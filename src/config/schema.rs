//! The table of keys, read from the JSON schema of [`RawConfig`].

use std::sync::OnceLock;

use schemars::generate::SchemaSettings;
use serde_json::{Map, Value};

use super::RawConfig;
use super::order::Order;

/// A value that an enumerated key takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Variant {
    /// How it is written.
    pub name: String,
    /// What it means.
    pub doc: String,
}

/// What a key's value is.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// true or false.
    Bool,
    /// A whole number, at least 0 when `unsigned`.
    Int {
        /// Whether negative numbers are refused.
        unsigned: bool,
    },
    /// A number; `single` when it is kept as f32.
    Float {
        /// Whether it is kept as f32.
        single: bool,
    },
    /// Text or a path.
    Text,
    /// One of a few words.
    OneOf(Vec<Variant>),
    /// A list.
    List(Box<Kind>),
}

impl Kind {
    /// What a right value looks like, in words.
    pub fn expected(&self) -> String {
        match self {
            Kind::Bool => "true or false".into(),
            Kind::Int { unsigned: true } => "a whole number, at least 0".into(),
            Kind::Int { unsigned: false } => "a whole number".into(),
            Kind::Float { .. } => "a number".into(),
            Kind::Text => "text".into(),
            Kind::OneOf(variants) => {
                let names: Vec<_> = variants.iter().map(|v| format!("{:?}", v.name)).collect();
                match names.as_slice() {
                    [only] => format!("{only}, the only choice"),
                    names => format!("one of {}", names.join(", ")),
                }
            }
            Kind::List(item) => format!("a list, each item {}", item.expected()),
        }
    }

    /// Whether a value from the environment or the command line is taken as it is written.
    pub fn is_textual(&self) -> bool {
        matches!(self, Kind::Text | Kind::OneOf(_))
    }
}

/// One key of the config.
#[derive(Clone, Debug)]
pub struct Key {
    /// Full name, "model.num_layers".
    pub path: String,
    /// What its value is.
    pub kind: Kind,
    /// Default as TOML; `None` when the key may be absent or has to be given.
    pub default: Option<String>,
    /// Whether the key may be absent (otherwise a key without default has to be given).
    pub optional: bool,
    /// What it does.
    pub doc: String,
}

impl Key {
    /// The part after the section.
    pub fn name(&self) -> &str {
        self.path.rsplit('.').next().unwrap_or(&self.path)
    }

    /// The part before the name.
    pub fn section(&self) -> &str {
        self.path
            .rsplit_once('.')
            .map_or("", |(section, _)| section)
    }
}

/// One table of the config.
#[derive(Clone, Debug)]
pub struct Section {
    /// Full name, "data.shards".
    pub path: String,
    /// Whether the whole table may be absent.
    pub optional: bool,
    /// What it is about.
    pub doc: String,
}

/// Every section and key, in the order of the structs.
#[derive(Debug, Default)]
pub struct Schema {
    /// Tables, parents before children.
    pub sections: Vec<Section>,
    /// Keys, section by section.
    pub keys: Vec<Key>,
}

impl Schema {
    /// The schema of [`RawConfig`].
    pub fn get() -> &'static Schema {
        static SCHEMA: OnceLock<Schema> = OnceLock::new();
        SCHEMA.get_or_init(|| {
            let settings = SchemaSettings::draft2020_12().with(|s| s.inline_subschemas = true);
            let root = settings
                .into_generator()
                .into_root_schema_for::<RawConfig>();
            // JSON objects of serde_json are sorted; the text of the default keeps the structs'
            // order.
            let order = serde_json::to_string(&RawConfig::default())
                .ok()
                .and_then(|text| serde_json::from_str(&text).ok())
                .unwrap_or_default();
            let mut schema = Schema::default();
            if let Some(object) = root.as_object() {
                schema.walk(object, "", &order);
            }
            schema
        })
    }

    /// The key of this full name.
    pub fn key(&self, path: &str) -> Option<&Key> {
        self.keys.iter().find(|k| k.path == path)
    }

    /// The section of this full name.
    pub fn section(&self, path: &str) -> Option<&Section> {
        self.sections.iter().find(|s| s.path == path)
    }

    /// The section or key whose name is nearest to `path`, if any is near.
    pub fn nearest(&self, path: &str) -> Option<&str> {
        let name = path.rsplit('.').next().unwrap_or(path);
        let sections = self.sections.iter().map(|s| s.path.as_str());
        let keys = self.keys.iter().map(|k| k.path.as_str());
        let likeness = |candidate: &str| {
            let whole = strsim::normalized_damerau_levenshtein(path, candidate);
            // The right name in the wrong section is nearer than any misspelling.
            let moved = candidate.rsplit('.').next() == Some(name);
            if moved { whole.max(0.9) } else { whole }
        };
        sections
            .chain(keys)
            .map(|candidate| (likeness(candidate), candidate))
            .filter(|(likeness, _)| *likeness >= 0.6)
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .map(|(_, candidate)| candidate)
    }

    fn walk(&mut self, object: &Map<String, Value>, prefix: &str, order: &Order) {
        let Some(properties) = object.get("properties").and_then(Value::as_object) else {
            return;
        };
        let rank = |name: &str| order.0.iter().position(|(n, _)| n == name);
        let mut names: Vec<&String> = properties.keys().collect();
        names.sort_by_key(|name| rank(name).unwrap_or(usize::MAX));
        let none = Order::default();
        let mut tables = Vec::new();
        for name in names {
            let Some(property) = properties[name].as_object() else {
                continue;
            };
            let path = if prefix.is_empty() {
                name.clone()
            } else {
                format!("{prefix}.{name}")
            };
            let (core, optional) = without_null(property);
            if core.contains_key("properties") {
                tables.push((name, path, core, optional, doc(property, core)));
            } else {
                let kind = kind(core);
                let default = property.get("default").filter(|d| !d.is_null());
                self.keys.push(Key {
                    path,
                    default: default.map(|d| toml_text(d, &kind)),
                    kind,
                    optional,
                    doc: doc(property, core),
                });
            }
        }
        for (name, path, core, optional, doc) in tables {
            self.sections.push(Section {
                path: path.clone(),
                optional,
                doc,
            });
            let order = rank(name).map_or(&none, |i| &order.0[i].1);
            self.walk(core, &path, order);
        }
    }
}

/// The schema of a property without its "or null", and whether it had one.
fn without_null(property: &Map<String, Value>) -> (&Map<String, Value>, bool) {
    let is_null = |v: &Value| v.get("type").and_then(Value::as_str) == Some("null");
    if let Some(any) = property.get("anyOf").and_then(Value::as_array)
        && any.iter().any(is_null)
        && let Some(core) = any.iter().find(|v| !is_null(v)).and_then(Value::as_object)
    {
        return (core, true);
    }
    let types = property.get("type").and_then(Value::as_array);
    let optional = types.is_some_and(|types| types.iter().any(|t| t == "null"));
    (property, optional)
}

fn doc(property: &Map<String, Value>, core: &Map<String, Value>) -> String {
    let text = |object: &Map<String, Value>| {
        object
            .get("description")
            .and_then(Value::as_str)
            .map(str::to_owned)
    };
    text(property).or_else(|| text(core)).unwrap_or_default()
}

fn kind(schema: &Map<String, Value>) -> Kind {
    let variants = variants(schema);
    if !variants.is_empty() {
        return Kind::OneOf(variants);
    }
    let type_name = match schema.get("type") {
        Some(Value::Array(types)) => types.iter().find(|t| *t != "null").and_then(Value::as_str),
        Some(other) => other.as_str(),
        None => None,
    };
    let format = schema.get("format").and_then(Value::as_str).unwrap_or("");
    match type_name {
        Some("boolean") => Kind::Bool,
        Some("integer") => Kind::Int {
            unsigned: format.starts_with('u'),
        },
        Some("number") => Kind::Float {
            single: format == "float",
        },
        Some("array") => {
            let item = schema.get("items").and_then(Value::as_object);
            Kind::List(Box::new(item.map_or(Kind::Text, kind)))
        }
        _ => Kind::Text,
    }
}

/// The words of an enum: variants with docs are a `oneOf` of constants, those without an `enum`.
fn variants(schema: &Map<String, Value>) -> Vec<Variant> {
    let mut found = Vec::new();
    let mut add = |name: &Value, doc: Option<&Value>| {
        if let Some(name) = name.as_str() {
            found.push(Variant {
                name: name.to_owned(),
                doc: doc.and_then(Value::as_str).unwrap_or("").to_owned(),
            });
        }
    };
    for one in schema
        .get("oneOf")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        if let Some(name) = one.get("const") {
            add(name, one.get("description"));
        }
        for name in one
            .get("enum")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
        {
            add(name, None);
        }
    }
    for name in schema
        .get("enum")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        add(name, None);
    }
    found
}

fn toml_text(value: &Value, kind: &Kind) -> String {
    match (value, kind) {
        (Value::Number(n), Kind::Float { single }) => {
            let v = n.as_f64().unwrap_or(f64::NAN);
            let v = if *single { shortest(v as f32) } else { v };
            format!("{v:?}")
        }
        _ => toml::Value::try_from(value).map_or_else(|_| value.to_string(), |v| v.to_string()),
    }
}

/// The f64 with the fewest digits that reads back as `v`: 0.95, not 0.949999988079071.
pub(super) fn shortest(v: f32) -> f64 {
    match v.to_string().parse::<f64>() {
        Ok(short) if short as f32 == v => short,
        _ => v as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_defaults_and_docs_come_from_the_structs() {
        let schema = Schema::get();
        let key = |path| schema.key(path).unwrap_or_else(|| panic!("no {path}"));
        assert_eq!(key("run.name").kind, Kind::Text);
        assert_eq!(key("run.dir").kind, Kind::Text);
        assert_eq!(key("run.seed").kind, Kind::Int { unsigned: true });
        assert_eq!(key("metrics.tensorboard").kind, Kind::Bool);
        assert_eq!(key("lr.peak").kind, Kind::Float { single: true });
        assert_eq!(
            key("hardware.peak_tflops").kind,
            Kind::Float { single: false }
        );
        assert_eq!(key("data.text").kind, Kind::List(Box::new(Kind::Text)));
        assert_eq!(
            key("optimizer.state").kind.expected(),
            r#"one of "f32", "8bit""#
        );
        assert_eq!(key("optimizer.beta2").default.as_deref(), Some("0.95"));
        assert_eq!(key("optimizer.eps").default.as_deref(), Some("1e-8"));
        assert_eq!(key("model.vocab_size").default, None);
        assert!(key("model.vocab_size").optional);
        assert_eq!(key("model.num_layers").doc, "Transformer blocks.");
        assert!(schema.section("data.shards").unwrap().optional);
        assert!(!key("data.shards.train").optional);
        assert_eq!(key("data.shards.train").default, None);
    }

    #[test]
    fn keys_stand_in_the_order_of_the_structs() {
        let lr: Vec<&str> = Schema::get()
            .keys
            .iter()
            .filter(|k| k.section() == "lr")
            .map(Key::name)
            .collect();
        let declared = [
            "peak",
            "min",
            "warmup_steps",
            "schedule",
            "decay_end",
            "decay_steps",
        ];
        assert_eq!(lr, declared);
        let sections: Vec<&str> = Schema::get()
            .sections
            .iter()
            .map(|s| s.path.as_str())
            .collect();
        assert_eq!(sections[..4], ["run", "data", "data.shards", "model"]);
    }

    #[test]
    fn the_nearest_key_is_a_misspelling_or_a_move_away() {
        let schema = Schema::get();
        assert_eq!(schema.nearest("model.num_layer"), Some("model.num_layers"));
        assert_eq!(schema.nearest("modle"), Some("model"));
        assert_eq!(
            schema.nearest("model.micro_batch"),
            Some("train.micro_batch")
        );
        assert_eq!(schema.nearest("qqqqqqqqqqqqqqqqqqqqq"), None);
    }
}
