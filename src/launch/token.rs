//! What tells a job's own ranks from strangers.

use std::fmt;

use sha2::{Digest, Sha256};

/// A 32-byte hash that the ranks of one job share. It keeps other jobs and stray connections out; it
/// travels in the clear, so it does not keep an eavesdropper out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Token(pub [u8; 32]);

impl Token {
    /// The job's, over all its restarts: from its id and, when there is one, its secret.
    pub fn of_job(run_id: &str, secret: Option<&str>) -> Self {
        let mut hash = Sha256::new();
        // Lengths first, so that no id and secret run into another pair's.
        for part in ["train job", run_id, secret.unwrap_or_default()] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Self(hash.finalize().into())
    }

    /// One start of the job: a rank left over from the start before has another.
    pub fn of_start(self, restart_count: u32) -> Self {
        let mut hash = Sha256::new();
        hash.update(self.0);
        hash.update(restart_count.to_le_bytes());
        Self(hash.finalize().into())
    }

    /// 64 hexadecimal digits.
    pub fn to_hex(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Debug for Token {
    /// Kept out of logs: with a secret, it is one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_changes_the_token() {
        let tokens = [
            Token::of_job("a", None),
            Token::of_job("b", None),
            Token::of_job("a", Some("s")),
            Token::of_job("as", None),
            Token::of_job("a", None).of_start(0),
            Token::of_job("a", None).of_start(1),
        ];
        for (i, a) in tokens.iter().enumerate() {
            assert!(tokens[..i].iter().all(|b| a != b), "{i}");
        }
        assert_eq!(tokens[0].to_hex().len(), 64);
        assert!(!format!("{:?}", tokens[0]).contains(&tokens[0].to_hex()[..4]));
    }
}
