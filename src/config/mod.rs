//! TOML, environment and command line to a validated [`Plan`].
//!
//! [`RawConfig`] is what the sources say, key by key; [`Plan`] is what the rest of the program
//! reads. Keys, types, defaults and docs come from the structs that components own, through
//! their JSON schema: one table serves parsing, error messages and `train config-reference`.

mod check; // values that cannot work, by section
mod explain; // figment's errors in the user's words
mod layer; // one source of values: file, environment variable, --set
mod order; // declaration order of fields
mod plan; // validated, derived values
mod raw; // the sections, and loading them
mod reference; // every key as a commented TOML file
mod schema; // the table of keys

pub use plan::Plan;
pub use raw::RawConfig;
pub use reference::reference;
pub use schema::{Key, Kind, Schema, Section, Variant};
