"""Conversations -> text, by the model's own chat template, cut where the assistant begins and ends to speak."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cortex_training.errors import ConfigurationError

Segment = tuple[str, bool]
"""A piece of the rendered conversation, and whether the assistant wrote it."""

Renderer = Callable[[Sequence[Mapping[str, Any]]], list[Segment]]


def conversation_renderer(template: str, special_tokens: Mapping[str, str]) -> Renderer:
    """A function that renders messages with `template` and marks every assistant message.

    The template runs in Jinja's sandbox, with the names that Hugging Face templates expect: `messages`,
    `add_generation_prompt`, the special tokens, `raise_exception` and the filter `tojson`. The current date is not
    offered (`strftime_now`), because the same row must become the same tokens tomorrow.

    An assistant message is the text that its turn adds to the conversation before it with the generation prompt,
    which is what the model will see when it has to answer. Raises ConfigurationError, from here or from the returned
    function, for a template that does not compile, refuses the messages, or rewrites earlier turns when later ones
    are added.
    """
    compiled = _compile(template)

    def render(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        try:
            return str(
                compiled.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **special_tokens)
            )
        except Exception as error:  # a template is a program from outside and can raise anything
            raise ConfigurationError(
                f"the chat template refuses the conversation of {len(messages)} messages: {error}"
            ) from error

    def segments(messages: Sequence[Mapping[str, Any]]) -> list[Segment]:
        pieces: list[Segment] = []
        done = ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if index == 0:
                raise ConfigurationError("messages[0] is the assistant's; put the user's or system's message before it")
            before = render(messages[:index], True)
            after = render(messages[: index + 1], False)
            if not before.startswith(done) or not after.startswith(before):
                raise ConfigurationError(
                    f"the chat template renders earlier turns differently once messages[{index}] is added, so the "
                    "assistant's part cannot be told from the rest; split the conversation into rows with one "
                    "assistant message each, or use prompt and completion"
                )
            pieces += [(before[len(done) :], False), (after[len(before) :], True)]
            done = after
        if not pieces:
            raise ConfigurationError("messages holds no message of the assistant, so there is nothing to learn")
        return pieces  # what follows the last assistant message carries no loss and is left out

    return segments


def _compile(template: str) -> Any:
    try:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ConfigurationError(
            "rendering messages needs the jinja2 package: pip install 'cortex-training-client[datasets]'"
        ) from None

    class GenerationTag(Extension):
        """``{% generation %}`` marks the assistant's part in newer templates; here it only has to parse."""

        tags = {"generation"}  # noqa: RUF012, jinja2 reads it from the class

        def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return body

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        # Jinja's own filter escapes HTML, which is not what models were trained on.
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ConfigurationError(f"the chat template does not compile: {error}") from error
