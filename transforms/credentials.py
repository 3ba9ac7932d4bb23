"""Google Cloud's default credentials, found or found missing at once."""

from __future__ import annotations

import os
import types
from typing import Any
from urllib.parse import urlsplit

_SECONDS = 1


def find_credentials(scope: str) -> Any:
    """Returns the default credentials.

    Where none are set, google-auth asks whether the machine is one of Google's: three times, which
    takes 3 seconds where nobody answers to the address, and 12 where nothing comes back. Its own
    machines answer in milliseconds, so here it is one second, once; GCE_METADATA_TIMEOUT brings
    back the library's patience.

    Args:
      scope: of the access token.

    Raises:
      google.auth.exceptions.DefaultCredentialsError: there are none, or none that can be used.
    """
    import google.auth
    from google.auth.exceptions import TransportError
    from google.auth.transport.requests import Request

    request = Request()

    def ask(url: str, *args: Any, **kwargs: Any) -> Any:
        if urlsplit(url).path.strip("/"):  # not the question whether anybody is there
            return request(url, *args, **kwargs)
        try:
            return request(url, *args, **{**kwargs, "timeout": _SECONDS})
        except TransportError:  # raised, it would be asked again
            return types.SimpleNamespace(status=0, headers={}, data=b"")

    patient = "GCE_METADATA_TIMEOUT" in os.environ
    credentials, _ = google.auth.default([scope], request=None if patient else ask)
    return credentials
