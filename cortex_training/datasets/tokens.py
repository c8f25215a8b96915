"""One row -> one document: token ids, and for each token whether the model is trained to predict it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cortex_training.datasets.chat import Renderer, conversation_renderer
from cortex_training.datasets.rows import Conversation, PlainText, PromptCompletion, Row
from cortex_training.datasets.tokenizer import Tokenizer
from cortex_training.errors import ConfigurationError


@dataclass(frozen=True)
class Document:
    """The tokens of one row. `tokens` is int32 ``[length]``; `loss` is bool ``[length]``, true where a token is
    learned.

    The first token is never learned: nothing comes before it that it could be predicted from.
    """

    row: int
    tokens: npt.NDArray[np.int32]
    loss: npt.NDArray[np.bool_]


def document_encoder(tokenizer: Tokenizer) -> Callable[[Row], Document]:
    """The function that turns rows into documents with `tokenizer`.

    * prompt and completion: the prompt as `generate` will send it, then the completion and the eos token; loss on the
      latter two. Nothing is put between them: a separator, if one is wanted, belongs to the prompt.
    * messages: the model's chat template; loss on what the assistant says, to the end token of its turn.
    * text: the text and the eos token; loss on everything.

    Pieces are encoded separately, because that is how they meet the model when it answers. Special tokens that are
    spelled out in a row's text are taken for special tokens, as the model's own tokenizer does. The function raises
    ConfigurationError for a row that cannot be rendered or holds nothing to learn.
    """
    eos = tokenizer.eos_token_id
    render: Renderer | None = None

    def conversation(content: Conversation) -> tuple[list[int], list[bool]]:
        nonlocal render
        if tokenizer.chat_template is None:
            raise ConfigurationError(
                f"messages need a chat template and {tokenizer.folder} has none (chat_template.jinja, or chat_template "
                "in tokenizer_config.json); use the tokenizer of an instruction-tuned model, or the columns prompt and "
                "completion"
            )
        if render is None:
            render = conversation_renderer(tokenizer.chat_template, tokenizer.special_tokens)
        ids: list[int] = []
        loss: list[bool] = []
        for text, spoken in render(content.messages):
            piece = tokenizer.encode(text)
            # Templates put a line break after the turn's end token; the model stops at the end token and never writes
            # it.
            said = len(piece) - piece[::-1].index(eos) if eos in piece else len(piece)
            ids += piece
            loss += [spoken and position < said for position in range(len(piece))]
        return ids, loss

    def ended(ids: list[int]) -> list[int]:
        return ids if ids[-1:] == [eos] else [*ids, eos]

    def pieces(row: Row) -> tuple[list[int], list[bool]]:
        content = row.content
        if isinstance(content, PromptCompletion):
            prompt = tokenizer.encode_opening(content.prompt)
            completion = ended(tokenizer.encode(content.completion))
            return prompt + completion, [False] * len(prompt) + [True] * len(completion)
        if isinstance(content, PlainText):
            ids = ended(tokenizer.encode_opening(content.text))
            return ids, [True] * len(ids)
        return conversation(content)

    def encode(row: Row) -> Document:
        try:
            ids, loss = pieces(row)
        except ConfigurationError as error:
            raise ConfigurationError(f"rows: row {row.number}: {error}") from error
        document = Document(row.number, np.array(ids, dtype=np.int32), np.array(loss, dtype=np.bool_))
        document.loss[:1] = False
        if not document.loss.any():
            raise ConfigurationError(
                f"rows: row {row.number} becomes {len(ids)} tokens of which none is to be learned; leave it out in the "
                "query"
            )
        return document

    return encode
