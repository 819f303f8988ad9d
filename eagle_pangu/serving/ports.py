"""Whether the ports of a configuration are free, asked before a process loads a model only to find that they are not.

The services' own binding stays the authority: a port taken later fails there.
"""

from __future__ import annotations

import contextlib
import errno
import socket

from eagle_pangu.serving.configuration import SettingsError
from eagle_pangu.serving.settings import SERVICES, ServerSettings, Settings


def require_free_ports(settings: Settings) -> None:
    """Listen on every port for a moment, as the services will: SO_REUSEADDR, and never SO_REUSEPORT.

    Raises:
        SettingsError: another program, or another service of this configuration, has the address of a service.
    """
    with contextlib.ExitStack() as held:  # all at once: two services cannot share an address either
        for name in SERVICES:
            own: ServerSettings = getattr(settings, name)
            if own.port == 0:
                continue
            try:
                held.enter_context(_listening(own.host, own.port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:  # the service itself can tell of everything else
                    raise SettingsError(
                        f"{name}.port: the address {own.host}:{own.port} is in use; expected a free port, or 0 for any"
                    ) from None


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host.strip("[]"), port), family=family)
