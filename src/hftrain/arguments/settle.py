"""From what the user wrote to what a run can rely on."""

from __future__ import annotations

from hftrain.arguments.checks import check_values
from hftrain.arguments.combinations import check_combinations
from hftrain.arguments.derive import derive
from hftrain.arguments.fields import ArgumentFields
from hftrain.arguments.normalize import convert_choices, normalize
from hftrain.arguments.renames import apply_renames


def settle(args: ArgumentFields) -> None:
    """Bring arguments into their one form, fill in what follows, and refuse what cannot work; mutates them.

    Doing it again changes nothing, so it may be repeated after attributes were assigned.

    Raises:
        ConfigError: A setting is unknown, out of range, or contradicts another.
    """
    normalize(args)
    apply_renames(args)
    convert_choices(args)
    derive(args)
    check_values(args)
    check_combinations(args)
