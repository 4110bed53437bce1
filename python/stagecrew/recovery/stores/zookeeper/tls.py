"""TLS to ZooKeeper, as the URL of a store configures it."""

from __future__ import annotations

import ssl

from stagecrew.errors import ConfigurationError

__all__ = ["tls_context"]


def tls_context(
    ca: str | None = None, certfile: str | None = None, keyfile: str | None = None, verify: str = "true"
) -> ssl.SSLContext:
    """Returns the context for these options of a URL. Without `ca`, it trusts the authorities of the system."""
    try:
        context = ssl.create_default_context(cafile=ca)
        if certfile or keyfile:
            # An empty password refuses an encrypted key, instead of prompting for one.
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
