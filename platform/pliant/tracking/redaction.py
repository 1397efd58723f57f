"""Which settings must never be written down."""

import re

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL", re.IGNORECASE)
_LOGIN_IN_URL = re.compile(r"://[^/\s]*:[^/\s]*@")

HIDDEN = "(not recorded)"


def recordable(name: str, value: str) -> str:
    """The value of an environment variable, or `HIDDEN` where it looks like a secret."""
    return HIDDEN if _SECRET.search(name) or _LOGIN_IN_URL.search(value) else value
