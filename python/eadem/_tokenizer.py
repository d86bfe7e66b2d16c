# SPDX-License-Identifier: Apache-2.0
"""Tokenizer: text to token ids and back, and conversations to prompts."""

from __future__ import annotations

import functools
import os
from typing import Any, Mapping, Optional, Sequence, Union

from eadem import _arguments, _eadem
from eadem._eadem import InvalidArgument

Messages = Sequence[Mapping[str, Any]]

# Arguments of transformers' apply_chat_template that would pass for variables of the template.
_NOT_HERE = {
    "padding": "pad the ids yourself",
    "truncation": "cut the conversation, or the ids, yourself",
    "max_length": "cut the conversation, or the ids, yourself",
    "return_tensors": "make a tensor of the ids",
    "return_assistant_tokens_mask": "no mask is made",
    "tokenizer_kwargs": "the template writes all special tokens",
    "sanitize_control_tokens": "control tokens in messages are text always",
}


def conversations(messages: Any) -> tuple[list[Any], bool]:
    """One conversation or several, as a list, and whether it was several."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidArgument(f"messages is {_arguments.given(messages)}; expected a list of messages, or of such lists")
    if messages and isinstance(messages[0], (list, tuple)):
        return list(messages), True
    return [messages], False


def options(*, tools: Optional[Sequence[Mapping[str, Any]]], documents: Optional[Sequence[Mapping[str, Any]]],
            chat_template: Optional[str], variables: Mapping[str, Any], add_generation_prompt: bool,
            continue_final_message: bool, openai: bool) -> _eadem.ChatOptions:
    _arguments.expect("the template's variables", variables, Mapping, "a dict")
    if any(callable(tool) for tool in tools or ()):
        raise InvalidArgument("tools holds a function; expected its JSON schema")
    return _eadem.ChatOptions(
        tools=_arguments.json("tools", tools), documents=_arguments.json("documents", documents),
        variables=_arguments.json("the template's variables", dict(variables)),
        chat_template="" if chat_template is None else _arguments.string("chat_template", chat_template),
        add_generation_prompt=_arguments.boolean("add_generation_prompt", add_generation_prompt),
        continue_final_message=_arguments.boolean("continue_final_message", continue_final_message), openai=openai)


class Tokenizer:
    """Text to token ids and back. Threads may share it."""

    def __init__(self, native: _eadem.NativeTokenizer) -> None:
        self._native = _arguments.expect("native", native, _eadem.NativeTokenizer, "what Tokenizer.from_file opens")

    @classmethod
    def from_file(cls, path: Union[str, os.PathLike[str]]) -> Tokenizer:
        """Reads a tokenizer.json, a tokenizer.model, a tiktoken.model, a .gguf, or the directory around one."""
        return cls(_eadem.NativeTokenizer.from_file(_arguments.path("path", path)))

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        add_special_tokens  put BOS and EOS around the text where the tokenizer wants them
        parse_special       read special tokens such as <|im_end|> from the text; switch it off for text that a user
                            controls
        """
        return self._native.encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of the ids; ill-formed UTF-8 becomes U+FFFD. Raises InvalidArgument on an id that is not a token."""
        return self._native.decode(ids, skip_special=skip_special)

    def apply_chat_template(self, conversation: Union[Messages, Sequence[Messages]],
                            tools: Optional[Sequence[Mapping[str, Any]]] = None,
                            documents: Optional[Sequence[Mapping[str, Any]]] = None,
                            chat_template: Optional[str] = None, add_generation_prompt: bool = False,
                            continue_final_message: bool = False, tokenize: bool = True, return_dict: bool = False,
                            **kwargs: Any) -> Any:
        """The token ids of a conversation as the model's chat template writes it, or its text.

        conversation   a list of messages such as {"role": "user", "content": "Hi"}; or a list of such lists, which
                       gives a list of results
        tools, documents
                       what the template shows of them: JSON schemas in OpenAI's shape, and dicts
        chat_template  the name of one of the model's templates, or the text of a template; None: `tool_use` if there
                       are tools and the model has it, else the default one
        add_generation_prompt
                       end with the beginning of an answer
        continue_final_message
                       end within the last message, to be continued
        tokenize       False: the text instead of ids
        return_dict    {"input_ids": ids, "attention_mask": ones} instead of ids
        kwargs         more variables of the template, such as enable_thinking=False

        The ids are those of transformers' apply_chat_template with sanitize_control_tokens=True: text of a message that
        spells <|im_end|>, or an added token that the template speaks of, stays text. Raises NotFound when there is no
        template, Unsupported for one that cannot be read, and InvalidArgument for what it refuses.
        """
        for name in kwargs:
            if name in _NOT_HERE:
                raise InvalidArgument(f"{name} is no argument here: {_NOT_HERE[name]}")
        chat_options = options(tools=tools, documents=documents, chat_template=chat_template, variables=kwargs,
                               add_generation_prompt=add_generation_prompt,
                               continue_final_message=continue_final_message, openai=False)
        several, many = conversations(conversation)
        results = [self._apply(messages, chat_options, tokenize, return_dict) for messages in several]
        return results if many else results[0]

    def _apply(self, messages: Any, chat_options: _eadem.ChatOptions, tokenize: bool, return_dict: bool) -> Any:
        text = _arguments.json("messages", messages)
        if not _arguments.boolean("tokenize", tokenize):
            return self._chat.render(text, chat_options)
        ids = self._chat.encode(text, chat_options)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict else ids

    @functools.cached_property
    def _chat(self) -> _eadem.ChatPrompt:
        return _eadem.ChatPrompt(self._native)

    def token_to_id(self, text: str) -> Optional[int]:
        """The id of a token as the vocabulary spells it; None if there is no such token."""
        return self._native.token_to_id(text)

    def token_text(self, id: int) -> str:
        """The token as the vocabulary spells it."""
        return self._native.token_text(id)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._native.vocab_size

    @property
    def bos_token_id(self) -> Optional[int]:
        return self._native.bos_token_id

    @property
    def eos_token_id(self) -> Optional[int]:
        return self._native.eos_token_id

    @property
    def pad_token_id(self) -> Optional[int]:
        return self._native.pad_token_id

    @property
    def unk_token_id(self) -> Optional[int]:
        return self._native.unk_token_id

    @property
    def chat_template(self) -> str:
        """Jinja source of the default template; empty if the files have none."""
        return self.chat_templates.get("default", "")

    @property
    def chat_templates(self) -> dict[str, str]:
        """Jinja sources of all templates, by name."""
        return self._native.chat_templates
