//! Which interface reaches the other machines.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};

use super::discover::is_loopback;

/// Addresses of `host:port` to try in turn, best first.
///
/// Where several machines take part, a name that resolves to loopback (Debian lists a machine's own
/// name as 127.0.1.1) would hide this machine from the others: then its outgoing interface comes first.
///
/// # Errors
/// The resolver's reason.
pub fn candidates(host: &str, port: u16, num_hosts: usize) -> Result<Vec<SocketAddr>, String> {
    let resolved = (host, port)
        .to_socket_addrs()
        .map_err(|e| format!("{host:?} does not resolve: {e}"))?;
    let mut addrs: Vec<SocketAddr> = Vec::new();
    for addr in resolved {
        if !addrs.contains(&addr) {
            addrs.push(addr);
        }
    }
    if num_hosts > 1
        && !is_loopback(host)
        && addrs.iter().all(|addr| addr.ip().is_loopback())
        && let Some(ip) = outgoing()
    {
        addrs.insert(0, SocketAddr::new(ip, port));
    }
    if addrs.is_empty() {
        return Err(format!("{host:?} resolves to no address"));
    }
    Ok(addrs)
}

/// The address that this machine's packets to the outside carry. Nothing is sent.
pub fn outgoing() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    // A documentation address (RFC 5737): routed by default, never assigned.
    socket.connect("198.51.100.1:9").ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_stay_and_names_resolve() {
        let of = |host| candidates(host, 7, 2);
        assert_eq!(of("10.1.2.3").unwrap(), ["10.1.2.3:7".parse().unwrap()]);
        assert!(
            of("localhost")
                .unwrap()
                .iter()
                .all(|a| a.ip().is_loopback())
        );
        let error = of("no such host").unwrap_err();
        assert!(
            error.contains("\"no such host\" does not resolve"),
            "{error}"
        );
    }
}
