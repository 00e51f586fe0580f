//! Resident memory of this process, as Linux counts it.

/// Bytes of this process in physical memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Resident {
    /// Now.
    pub now_bytes: Option<u64>,
    /// At most so far.
    pub peak_bytes: Option<u64>,
}

/// Reads `/proc/self/status`; nothing where there is none.
pub fn resident() -> Resident {
    std::fs::read_to_string("/proc/self/status").map_or_else(|_| Resident::default(), |s| parse(&s))
}

fn parse(status: &str) -> Resident {
    // "VmRSS:\t  123456 kB"
    let field = |name: &str| {
        let rest = status.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib * 1024)
    };
    Resident {
        now_bytes: field("VmRSS:"),
        peak_bytes: field("VmHWM:"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_in_kib() {
        let status = "Name:\ttrain\nVmHWM:\t    2048 kB\nVmRSS:\t      12 kB\n";
        let expected = Resident {
            now_bytes: Some(12 * 1024),
            peak_bytes: Some(2048 * 1024),
        };
        assert_eq!(parse(status), expected);
        assert_eq!(parse("VmRSS:\tmuch\n"), Resident::default());
    }
}
