"""Python's own TLS, for connections to NATS and Redis: this process's certificate on each new
connection, and only servers that its authorities certify under the name in the address.
"""

from __future__ import annotations

import ssl

from pdmesh.net.tls.certificate_renewal import AUTHORITIES, CERTIFICATE, KEY, CertificateFolder


def client_context(folder: CertificateFolder | None) -> ssl.SSLContext:
    """Without certificates: no client certificate, and the system's authorities.

    Raises OSError: the files are being replaced at this moment, or cannot be read.
    """
    if folder is None:
        return ssl.create_default_context()
    context = ssl.create_default_context(cafile=folder.path / AUTHORITIES)
    context.load_cert_chain(folder.path / CERTIFICATE, folder.path / KEY)
    return context
