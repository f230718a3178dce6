"""Logins by name: what a job carries is a name, and each machine that runs a part of it knows what that means. Driver.

Options of a job reach plans, logs and web pages; an environment variable or a file on the machine does not. The name
`reports` is looked for in this order:

    HEADRACE_TOKEN_REPORTS          user:password
    $HEADRACE_TOKENS/reports        a file that holds the same; without that variable in ~/.config/headrace/tokens

Without a name nobody logs in, but for HEADRACE_USER and HEADRACE_PASSWORD where both are set, as for the command line.
Neighbours: access_http.py sends it; nothing else reads it, and nothing prints it.
"""

import os
import re
from base64 import b64encode
from pathlib import Path

from headrace.spark.access import NotAllowed

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def check_token_name(name: str) -> None:
    """Raise ValueError for what is no name, and may be a secret that was given by mistake: it is not repeated."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            "the name of a token is letters, digits, '_', '-' and '.': give its name, never the token itself"
        )


def authorization(name: str | None) -> str | None:
    """The header that says who asks, or None for nobody. Raises NotAllowed for a name this machine does not know."""
    if name is None:
        user, password = os.environ.get("HEADRACE_USER"), os.environ.get("HEADRACE_PASSWORD")
        secret = f"{user}:{password}" if user and password is not None else None
        return None if secret is None else _basic(secret)
    check_token_name(name)
    variable = "HEADRACE_TOKEN_" + re.sub(r"[^A-Z0-9]", "_", name.upper())
    secret = os.environ.get(variable)
    folder = Path(os.environ.get("HEADRACE_TOKENS") or Path.home() / ".config" / "headrace" / "tokens")
    if secret is None:
        try:
            secret = (folder / name).read_text().strip()
        except (OSError, ValueError):
            raise NotAllowed(
                f"this machine knows no token {name!r}: neither {variable} nor a file in {folder}"
            ) from None
    if ":" not in secret:
        raise NotAllowed(f"the token {name!r} is not user:password")
    return _basic(secret)


def _basic(secret: str) -> str:
    return f"Basic {b64encode(secret.encode()).decode()}"
