//! Slurm's compressed lists: hosts and tasks a node.

/// The first host of `list`, such as "gpu[07-09,12],login1" -> "gpu07".
///
/// # Errors
/// What is wrong with the list.
pub fn first_host(list: &str) -> Result<String, String> {
    let wrong = |what: &str| format!("{list:?}: {what}");
    // The first element ends at the first comma outside brackets.
    let mut depth = 0usize;
    let mut end = list.len();
    for (i, c) in list.char_indices() {
        match c {
            '[' => depth += 1,
            ']' => depth = depth.checked_sub(1).ok_or_else(|| wrong("] without ["))?,
            ',' if depth == 0 => {
                end = i;
                break;
            }
            _ => {}
        }
    }
    if depth != 0 {
        return Err(wrong("[ without ]"));
    }
    // Several brackets multiply: rack[1-2]node[0-3]. The first host takes the first of each.
    let mut host = String::new();
    let mut rest = &list[..end];
    while let Some((before, after)) = rest.split_once('[') {
        let (range, after) = after.split_once(']').ok_or_else(|| wrong("[ without ]"))?;
        if range.contains('[') {
            return Err(wrong("brackets in brackets"));
        }
        let first = range.split([',', '-']).next().unwrap_or_default();
        if first.is_empty() || !first.bytes().all(|b| b.is_ascii_digit()) {
            return Err(wrong("a bracket does not start with a number"));
        }
        host += before;
        host += first;
        rest = after;
    }
    host += rest;
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-._:".contains(c);
    if host.is_empty() || !host.chars().all(is_name) {
        return Err(wrong("expected host names such as node[01-04,07]"));
    }
    Ok(host)
}

/// Tasks on node `node` from a list such as "2(x3),1".
///
/// # Errors
/// What is wrong with the list.
pub fn tasks_on_node(list: &str, node: usize) -> Result<usize, String> {
    let wrong = || format!("{list:?}: expected counts such as 2(x3),1");
    let mut first = 0usize;
    for part in list.split(',') {
        let (count, repeat) = match part.split_once("(x") {
            Some((count, repeat)) => (count, repeat.strip_suffix(')').ok_or_else(wrong)?),
            None => (part, "1"),
        };
        let count: usize = count.parse().map_err(|_| wrong())?;
        let repeat: usize = repeat.parse().map_err(|_| wrong())?;
        first = first.checked_add(repeat).ok_or_else(wrong)?;
        if node < first {
            return Ok(count);
        }
    }
    Err(format!("{list:?} has {first} nodes: no node {node}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_first_host_of_every_form() {
        for (list, first) in [
            ("node1", "node1"),
            ("node1,node2", "node1"),
            ("gpu[07-09,12],login1", "gpu07"),
            ("gpu[3,1-2]", "gpu3"),
            ("rack[1-2]node[00-15]", "rack1node00"),
            ("n[1-2]-ib.cluster", "n1-ib.cluster"),
            ("10.0.0.1,10.0.0.2", "10.0.0.1"),
        ] {
            assert_eq!(first_host(list).unwrap(), first, "{list}");
        }
        for list in [
            "", ",", "n[", "n]", "n[]", "n[a-b]", "n[[1]]", "n 1", "n[1-2", "n1]]",
        ] {
            let error = first_host(list).unwrap_err();
            assert!(error.contains(&format!("{list:?}")), "{error}");
        }
    }

    #[test]
    fn tasks_of_every_form() {
        for (list, node, tasks) in [
            ("4", 0, 4),
            ("2(x3),1", 2, 2),
            ("2(x3),1", 3, 1),
            ("1,2", 1, 2),
        ] {
            assert_eq!(tasks_on_node(list, node).unwrap(), tasks, "{list}");
        }
        for (list, node) in [
            ("", 0),
            ("2(x3", 0),
            ("2x3", 0),
            ("a", 0),
            ("2(x3)", 3),
            ("-1", 0),
        ] {
            tasks_on_node(list, node).unwrap_err();
        }
    }

    proptest! {
        #[test]
        fn nothing_panics(list in "[a-z0-9,x()\\[\\] -]{0,24}", any in any::<String>(), node in 0usize..5) {
            for list in [list, any] {
                let _ = tasks_on_node(&list, node);
                if let Ok(host) = first_host(&list) {
                    prop_assert!(!host.is_empty() && !host.contains(['[', ']', ',']));
                }
            }
        }

        /// Against the expansion written out.
        #[test]
        fn the_list_expands_to_its_first(prefix in "[a-z]{1,4}", from in 0u32..50, more in 0u32..9, width in 1usize..4) {
            let first = format!("{from:0width$}");
            let list = format!("{prefix}[{first}-{:0width$}],zz", from + more);
            prop_assert_eq!(first_host(&list).unwrap(), prefix + &first);
        }
    }
}
