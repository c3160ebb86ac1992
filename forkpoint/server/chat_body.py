"""The body of a chat completion, to which those of other APIs are translated."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import Field, model_validator

from forkpoint.server.errors import HTTPError
from forkpoint.server.protocol import Body, Many, MaxTokens
from forkpoint.server.sampling import SamplingBody, bounded


class FunctionSpec(Body):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolSpec(Body):
    """`type` is function; OpenAI's custom tools, which take free text, are refused."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Body):
    name: str


class ToolChoice(Body):
    """The function that the answer must call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: list[ToolChoice] = Field(min_length=1)


class AllowedToolsChoice(Body):
    """The functions that may be called, of those that there are; mode required: one of them must be."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


AnyToolChoice: TypeAlias = Literal["none", "auto", "required"] | ToolChoice | AllowedToolsChoice


class ChatMessage(Body):
    """One message; `content` is a text or a list of text parts."""

    role: str
    content: str | Many[dict[str, Any]] | None = None
    tool_calls: Many[dict[str, Any]] | None = None


class ChatBody(SamplingBody, apis=("completions", "chat")):
    """Answer a conversation. The end of each message is a breakpoint of the prefix cache."""

    messages: Many[ChatMessage] = Field(min_length=1)
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = bounded("logprobs")
    tools: Many[ToolSpec] | None = None
    tool_choice: AnyToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: the answer ends with its first call")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Many[dict[str, Any]] | None = Field(None, description="for templates that show them")
    reasoning_effort: str | None = Field(
        None, description="for the template, as `reasoning_effort` and as `enable_thinking`: false for `none`"
    )
    include_reasoning: bool | None = Field(None, description="false: reasoning is not told")

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise HTTPError(400, "top_logprobs are told with logprobs: true", param="top_logprobs")
        return self
