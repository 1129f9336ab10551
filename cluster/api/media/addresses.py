"""Which hosts and addresses pictures may be fetched from."""

import ipaddress
from collections.abc import Iterable

_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "168.63.129.16/32",  # Azure's own services for a machine, at a public address
            "192.0.0.0/24",  # protocols' own addresses; 192.0.0.192 has a cloud's metadata
            "192.88.99.0/24",  # relays of 6to4
            "fec0::/10",  # private until 2004
            "3fff::/20",  # documentation; older versions of Python do not know it
            "64:ff9b::/96",  # an IPv4 address inside IPv6, which a gateway unpacks: NAT64, 6to4, Teredo
            "64:ff9b:1::/48",
            "2002::/16",
            "2001::/32",
        ),
    )
)


class AllowedHosts:
    """The hosts that an operator has named: `images.example` is that host alone, `.example` every host below it."""

    def __init__(self, domains: Iterable[str]) -> None:
        self._names = {domain for domain in domains if not domain.startswith(".")}
        self._suffixes = tuple(domain for domain in domains if domain.startswith("."))

    def __bool__(self) -> bool:
        return bool(self._names or self._suffixes)

    def allows(self, host: str) -> bool:
        """Return whether a host is named. `host`: as in a URL, in ASCII."""
        host = host.lower()
        return host in self._names or host.endswith(self._suffixes or ("\0",))


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to the public internet, whatever else it may embed."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if not ip.is_global or ip.is_multicast or ip.is_reserved:
        return False
    return not any(ip in network for network in _NOT_PUBLIC if network.version == ip.version)
