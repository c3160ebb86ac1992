"""The body of a chat completion. The bodies of the other chat APIs are translated to it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from forkpoint.server.custom_tools import custom_function
from forkpoint.server.errors import HTTPError
from forkpoint.server.protocol import Body, Many, MaxTokens
from forkpoint.server.sampling import SamplingBody, bounded


class FunctionSpec(Body):
    """A function. With `strict` all calls of it match the schema of its `parameters`."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomSpec(Body):
    name: str = Field(min_length=1)
    description: str | None = None
    format: dict[str, Any] | None = None


class ToolMember(Body):
    """An object with a `function` or a `custom` tool. A custom tool gets the `function` that the model sees for it.

    The members of either may also be given flat, as in the Responses API. Cursor sends chats this form.
    """

    @model_validator(mode="before")
    @classmethod
    def _nest(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kind = given.get("type") or "function"
        if "input_schema" in given:  # Anthropic's name, of tools that it calls custom
            kind = "function"
        if kind in ("function", "custom") and kind not in given and "name" in given:
            inner = {name: value for name, value in given.items() if name != "type"}
            if "input_schema" in inner:
                inner.setdefault("parameters", inner.pop("input_schema"))
            given = {"type": kind, kind: inner}
        if kind == "custom" and isinstance(given.get("custom"), dict):
            return {**given, "function": custom_function(given["custom"])}
        return given


class ToolSpec(ToolMember):
    """A function that the model may call, or OpenAI's `custom` tool, which takes a free text.

    With `defer_loading` the model sees the tool where a result refers to it, and not before.
    """

    type: Literal["function", "custom"] = "function"
    custom: CustomSpec | None = None
    function: FunctionSpec
    defer_loading: bool | None = None


class NamedFunction(Body):
    name: str


class FunctionChoice(ToolMember):
    """A choice of one function or custom tool, which the answer must call."""

    type: Literal["function", "custom"] = "function"
    custom: NamedFunction | None = None
    function: NamedFunction


class AllowedFunctions(Body):
    """The functions that the answer may call; with the mode `required` it must call one of them."""

    mode: Literal["auto", "required"]
    tools: Many[FunctionChoice] = Field(min_length=1)


class AllowedFunctionsChoice(Body):
    """A choice of some of the functions in `tools`."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


AnyToolChoice: TypeAlias = Literal["none", "auto", "required"] | FunctionChoice | AllowedFunctionsChoice


def _choice(given: Any) -> Any:
    """Return the text of a choice that is an object with its type alone, as in Anthropic's API; else `given`."""
    kinds = {"none": "none", "auto": "auto", "required": "required", "any": "required"}
    if isinstance(given, dict) and given.keys() == {"type"} and isinstance(given["type"], str):
        return kinds.get(given["type"], given)
    return given


class ChatMessage(Body):
    """A message. `content` is a text or a list of text parts."""

    role: str
    content: str | Many[dict[str, Any]] | None = None
    tool_calls: Many[dict[str, Any]] | None = None


class ReasoningOptions(Body):
    """OpenAI's and OpenRouter's options. `effort` goes to the chat template. Only responses have a `summary`."""

    effort: str | None = None
    summary: str | None = None
    enabled: bool | None = None
    exclude: bool | None = Field(None, description="true: the answer leaves reasoning out")


class ThinkingOptions(Body):
    """The types `enabled` and `disabled` switch thinking on or off. Any other type leaves it to the chat template."""

    type: str


class ThinkingFields(Body):
    """The fields by which clients of any API ask for thinking."""

    enable_thinking: bool | None = Field(None, description="passed to the chat template")
    reasoning_effort: str | None = Field(
        None, description="passed to the chat template; also sets `enable_thinking`: false for `none`, otherwise true"
    )
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: int | None = bounded(
        "thinking_token_budget", "end the reasoning after so many tokens; -1: no limit"
    )

    def thinking_variables(self, thinking: ThinkingOptions | None = None) -> dict[str, Any]:
        """Return the variables of the chat template that follow from these fields and `thinking`.

        If fields disagree, `enable_thinking` wins over `thinking`, which wins over `reasoning.enabled` and the effort.
        """
        variables: dict[str, Any] = {}
        reasoning = self.reasoning
        effort = self.reasoning_effort or (reasoning and reasoning.effort)
        if effort is not None:
            variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        if reasoning is not None and reasoning.enabled is not None:
            variables["enable_thinking"] = reasoning.enabled
        if thinking is not None and thinking.type in ("enabled", "disabled"):
            variables["enable_thinking"] = thinking.type == "enabled"
        if self.enable_thinking is not None:
            variables["enable_thinking"] = self.enable_thinking
        return variables


class ChatBody(SamplingBody, ThinkingFields, path="/v1/chat/completions", apis=("completions", "chat")):
    """Answer a conversation. The end of each message is a breakpoint of the prefix cache."""

    messages: Many[ChatMessage] = Field(min_length=1)
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = bounded("logprobs")
    tools: Many[ToolSpec] | None = None
    tool_choice: Annotated[AnyToolChoice | None, BeforeValidator(_choice)] = None
    functions: Many[FunctionSpec] | None = Field(None, description="the older form of `tools`; at most one is called")
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: the answer ends with its first call")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = Field(
        None, description="sizes of the request's images, such as min_pixels and max_pixels of Qwen3.5"
    )
    media_io_kwargs: dict[str, Any] | None = Field(
        None, description="how files of images and videos are read: rgba_background_color, num_frames and fps"
    )
    documents: Many[dict[str, Any]] | None = Field(None, description="passed to the chat template, which may show them")
    thinking: ThinkingOptions | None = None
    include_reasoning: bool | None = Field(None, description="false: the answer leaves reasoning out")

    @property
    def reports_reasoning(self) -> bool:
        """Whether the answer may contain reasoning."""
        if self.include_reasoning is not None:
            return self.include_reasoning
        return self.reasoning is None or not self.reasoning.exclude

    @model_validator(mode="after")
    def _take_functions(self) -> ChatBody:
        """Set the tools and the choice for `functions` and `function_call`."""
        functions, choice = self.functions, self.function_call
        if not functions:
            if isinstance(choice, NamedFunction):
                text = "function_call asks for a call, but there are no functions; give functions or leave it out"
                raise HTTPError(400, text, param="function_call")
            return self
        if self.tools or self.tool_choice is not None:
            text = "functions are the older form of tools and tool_choice, and both are given; give one form"
            raise HTTPError(400, text, param="functions")
        self.tools, self.parallel_tool_calls = [ToolSpec(function=function) for function in functions], False
        if isinstance(choice, NamedFunction):
            names = [function.name for function in functions]
            if choice.name not in names:
                text = f"function_call names {choice.name!r}; the functions are {', '.join(names)}"
                raise HTTPError(400, text, param="function_call")
            self.tool_choice = FunctionChoice(function=choice)
        else:
            self.tool_choice = choice
        return self

    @model_validator(mode="after")
    def _continue_prefix(self) -> ChatBody:
        """Continue a last answer that the client marks as the beginning of the next: `prefix` or `partial`."""
        last = self.messages[-1]
        marks = last.model_extra or {}
        is_marked = last.role == "assistant" and (marks.get("prefix") is True or marks.get("partial") is True)
        if is_marked and self.continue_final_message is None:
            self.continue_final_message = True
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise HTTPError(
                400, "top_logprobs need logprobs: true; set it, or leave top_logprobs out", param="top_logprobs"
            )
        return self
