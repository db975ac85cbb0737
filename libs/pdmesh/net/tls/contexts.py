"""TLS contexts of Python's `ssl` module, for connections to NATS.

A connection shows this process's certificate. The connection accepts only a server whose
certificate is from one of the process's authorities and names the host in the address.
"""

from __future__ import annotations

import ssl

from pdmesh.net.tls.certificate_renewal import AUTHORITIES, CERTIFICATE, KEY, CertificateFolder


def client_context(folder: CertificateFolder | None) -> ssl.SSLContext:
    """A context with the present files of the folder.

    Without a folder, there is no client certificate, and the system's authorities are used. Raises
    OSError if the files cannot be read or do not match, for example while they are being replaced.
    """
    if folder is None:
        return ssl.create_default_context()
    context = ssl.create_default_context(cafile=folder.path / AUTHORITIES)
    context.load_cert_chain(folder.path / CERTIFICATE, folder.path / KEY)
    return context
