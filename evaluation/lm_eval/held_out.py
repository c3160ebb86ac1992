"""The held-out suite as a task of lm-eval, which loads this file for the YAML files beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import datasets
from lm_eval.api.task import ConfigurableTask

from evaluation.dialogue import Message, render
from evaluation.suite import held_out_suite


def load(num_examples: int = 260, seed: int = 0, task: str | None = None, **_: Any) -> dict[str, datasets.Dataset]:
    """Return the examples of one task, or of all tasks, among the suite's first `num_examples`. `--metadata` may
    replace the values.

    lm-eval also passes the model's arguments, which are not used here.
    """
    rows = [
        {"name": example.name, "messages": json.dumps(example.messages), "answer": example.answer}
        for example in held_out_suite(seed, num_examples)
        if task in (None, example.task)
    ]
    return {"test": datasets.Dataset.from_list(rows)}


class HeldOut(ConfigurableTask):  # type: ignore[misc]  # lm-eval is not among what mypy sees
    """A task of conversations with many turns, which lm-eval would otherwise join into one message."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={name: value for name, value in config.items() if name != "class"})

    def fewshot_context(
        self, doc: dict[str, Any], num_fewshot: int, *_: Any, chat_template: Callable[..., Any] | None = None, **__: Any
    ) -> Any:
        """Return the conversation for the server: messages for chats, otherwise text as the chat template renders
        it."""
        if num_fewshot:
            raise ValueError(f"num_fewshot={num_fewshot}: each conversation has its own facts; use 0")
        messages = json.loads(doc["messages"])
        if chat_template is not None:
            return chat_template(messages, add_generation_prompt=True)
        return render([Message(**message) for message in messages], add_generation_prompt=True)
