//! Typed reads of the launcher's variables.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::str::FromStr;

use crate::{Error, Result};

/// Environment variables, copied, so that discovery is a function of its arguments.
#[derive(Clone, Debug, Default)]
pub struct Environment(BTreeMap<String, String>);

impl Environment {
    /// The process's. What is not UTF-8 keeps a replacement character, which no number survives.
    pub fn of_process() -> Self {
        std::env::vars_os()
            .map(|(k, v)| {
                (
                    k.to_string_lossy().into_owned(),
                    v.to_string_lossy().into_owned(),
                )
            })
            .collect()
    }

    /// The variable's value. Set to nothing counts as not set: shells make the one easily out of the
    /// other.
    pub fn get(&self, name: &str) -> Option<&str> {
        let value = self.0.get(name)?.trim();
        (!value.is_empty()).then_some(value)
    }

    /// Whether the variable is set.
    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// The variable as a number or address.
    ///
    /// # Errors
    /// [`Error::Config`] with name and value when it does not parse.
    pub fn parsed<T: FromStr>(&self, name: &str, expected: &str) -> Result<Option<T>> {
        self.get(name)
            .map(|value| {
                value.parse().map_err(|_| {
                    Error::Config(format!(
                        "{name} = {value:?} in the environment: expected {expected}"
                    ))
                })
            })
            .transpose()
    }

    /// The variable as a count or index.
    ///
    /// # Errors
    /// As [`Environment::parsed`].
    pub fn number(&self, name: &str) -> Result<Option<usize>> {
        self.parsed(name, "a whole number, 0 or more")
    }

    /// TRAIN_BIND_ADDR.
    ///
    /// # Errors
    /// As [`Environment::parsed`].
    pub fn bind_addr(&self) -> Result<Option<IpAddr>> {
        self.parsed(
            "TRAIN_BIND_ADDR",
            "an IP address such as 10.0.0.1 or 0.0.0.0",
        )
    }

    /// A variable that must be there because `because` is.
    ///
    /// # Errors
    /// [`Error::Config`] when it is not set, or as [`Environment::parsed`].
    pub fn required(&self, name: &str, because: &str) -> Result<usize> {
        self.number(name)?
            .ok_or_else(|| self.missing(name, because))
    }

    /// The error of a launcher's variables that are there in part.
    pub fn missing(&self, name: &str, because: &str) -> Error {
        Error::Config(format!(
            "{because} = {:?} is set in the environment and {name} is not: set {name}, or unset \
             {because} for a run of one rank",
            self.get(because).unwrap_or_default()
        ))
    }
}

impl<K: Into<String>, V: Into<String>> FromIterator<(K, V)> for Environment {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(variables: I) -> Self {
        let pairs = variables.into_iter();
        Self(pairs.map(|(k, v)| (k.into(), v.into())).collect())
    }
}
