//! `[comm]`.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::CommOptions;

/// What connects ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// The built-in collectives: TCP between nodes, shared memory or TCP inside one.
    #[default]
    Tcp,
}

/// What carries data between the ranks of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LocalTransport {
    /// Shared memory, and where it cannot be had, TCP with a warning.
    #[default]
    Auto = 0,
    /// Shared memory or an error.
    Shm = 1,
    /// TCP.
    Tcp = 2,
}

impl LocalTransport {
    pub(super) const ALL: [Self; 3] = [Self::Auto, Self::Shm, Self::Tcp];
}

/// How ranks talk to each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CommConfig {
    /// What connects ranks.
    pub backend: Backend,
    /// What carries data between the ranks of a node.
    pub local: LocalTransport,
    /// Seconds that ranks wait for each other before they give up and name those that are missing.
    pub timeout_s: u64,
}

impl Default for CommConfig {
    fn default() -> Self {
        Self {
            backend: Backend::Tcp,
            local: LocalTransport::Auto,
            timeout_s: 300,
        }
    }
}

impl CommConfig {
    /// What [`connect`](super::connect) takes.
    pub fn options(&self) -> CommOptions {
        CommOptions {
            timeout: Duration::from_secs(self.timeout_s),
            local: self.local,
        }
    }
}
