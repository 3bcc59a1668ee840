"""Pushing to the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import dataclass, field

from hftrain.arguments.enums import HubStrategy


@dataclass(kw_only=True, repr=False)
class HubArguments:
    """The Hub. Source: the documented `TrainingArguments`."""

    push_to_hub: bool = field(default=False, metadata={"help": "Push the model to the Hub each time it is saved."})
    hub_model_id: str | None = field(
        default=None, metadata={"help": "The repository; the user's, named as output_dir, if not given."}
    )
    hub_strategy: HubStrategy | str = field(
        default="every_save",
        metadata={"help": "What to push, and when: 'end', 'every_save', 'checkpoint' or 'all_checkpoints'."},
    )
    hub_token: str | None = field(
        default=None, repr=False, metadata={"help": "Access token; the stored login if not given."}
    )
    hub_private_repo: bool | None = field(
        default=None, metadata={"help": "Make a new repository private; None follows the owner's default."}
    )
    hub_always_push: bool = field(default=False, metadata={"help": "Push although the previous push has not ended."})
    hub_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit to push to."})
    push_to_hub_model_id: str | None = field(default=None, metadata={"help": "Old form of hub_model_id."})
    push_to_hub_organization: str | None = field(
        default=None, metadata={"help": "Old form of the owner in hub_model_id."}
    )
    push_to_hub_token: str | None = field(default=None, repr=False, metadata={"help": "Old name of hub_token."})
