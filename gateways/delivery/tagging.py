"""Tags by policy: which rules an exchange has. Machine over filtering/rules.py.

The policy setting `tag-rules` is a table: patterns over keys, each with the list of tags it gives. It was checked when
the policy was set (controller/policies.py).
"""

from collections.abc import Mapping
from functools import lru_cache

from headrace.controller.table import Table
from headrace.filtering.rules import TagRules

SETTING = "tag-rules"


def rules_of(policy: Table) -> TagRules | None:
    """The same object for the same policy; None: it has no rules."""
    found = policy.get(SETTING)
    if not isinstance(found, Mapping) or not found:
        return None
    return _compiled(tuple((str(pattern), str(tags)) for pattern, tags in found.items()))


@lru_cache(maxsize=1024)
def _compiled(rules: tuple[tuple[str, str], ...]) -> TagRules:
    return TagRules(dict(rules))
