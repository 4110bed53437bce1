"""TLS for connections to ZooKeeper, as configured by the URL of a store."""

from __future__ import annotations

import ssl

from stagecrew.errors import ConfigurationError

__all__ = ["tls_context"]


def tls_context(
    ca: str | None = None, certfile: str | None = None, keyfile: str | None = None, verify: str = "true"
) -> ssl.SSLContext:
    """Returns the TLS context for these options of a URL. Without `ca`, it trusts the system's authorities."""
    try:
        context = ssl.create_default_context(cafile=ca)
        if certfile or keyfile:
            # With an empty password, an encrypted key raises an error. Without one, OpenSSL would prompt for it.
            context.load_cert_chain(certfile or keyfile or "", keyfile, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"the certificates for ZooKeeper cannot be read ({error}): check the files ca={ca}, certfile={certfile}, "
            f"keyfile={keyfile}"
        ) from error
    if verify == "false":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
