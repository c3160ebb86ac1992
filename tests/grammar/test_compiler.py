"""What cannot be compiled is refused, and what is kept of the rest is bounded."""

from __future__ import annotations

from typing import Any

import pytest

from forkpoint.errors import InvalidParamsError
from forkpoint.grammar.compiler import MAX_KEPT_GRAMMARS, GrammarCompiler
from forkpoint.params import SamplingParams, StructuredOutputsParams
from forkpoint.sched.request import Grammar
from tests.engine.tokenizers import byte_level


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_level(), 407, {1})


def start(compiler: GrammarCompiler, **wanted: Any) -> Grammar | None:
    return compiler.start(SamplingParams(structured_outputs=StructuredOutputsParams(**wanted)), {1})


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"regex": "a^b"}, "the regular expression cannot be compiled: .*lookarounds"),
        ({"grammar": "root ::= r0\n" + "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(9000))}, "grammar"),
        (
            {"grammar": 'begin: "a"'},
            r"neither a rule 'root ::= ...', as in GBNF, nor a rule 'start: ...', as in Lark",
        ),
        ({"grammar": '%llguidance {"a": 1}\nstart: "a"'}, "Lark may not have '%llguidance' here; leave it out"),
        (
            {"grammar": 'start: %json {"not": {"type": "null"}}'},
            "the grammar cannot be compiled: the JSON schema uses 'not' at /",
        ),
        ({"grammar": "start: @content"}, "Lark may not have '@content' here"),
        ({"grammar": "start: <|im_end|>"}, r"Lark may not have '<\|im_end\|>' here"),
        ({"grammar": 'start: x\nx[temperature=0.1]: "a"'}, "Lark may not have 'temperature=' here; leave it out"),
        ({"grammar": "start: middle"}, "middle"),
        ({"regex": "("}, r"the regular expression cannot be compiled: unclosed group at '\('$"),
        ({"regex": "xa{2,1}"}, r"start must be <= the end at '\{2,1\}'$"),
        (
            {"json": {"type": "string", "pattern": "("}},
            r"^the JSON schema uses 'pattern' at /, which cannot be enforced: unclosed group at '\('$",
        ),
        ({"json": {"allOf": 3}}, "^the JSON schema uses 'allOf' at /"),
        ({"structural_tag": "{}"}, "^the structural tag has no 'format'"),
        ({"regex": "(" * 65 + "a" + ")" * 65}, "nested too deep"),
        ({"grammar": "root ::= " + "(" * 65 + '"a"' + ")" * 65}, "nested too deep"),
        ({"structural_tag": "[" * 65 + "]" * 65}, "nested too deep"),
    ],
)
def test_what_is_passed_over_or_wrong_is_refused(
    compiler: GrammarCompiler, wanted: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidParamsError, match=message) as error:
        start(compiler, **wanted)
    assert "/project/cpp" not in str(error.value)
    assert "Warning" not in capfd.readouterr().err


def test_an_end_without_a_token_is_left_out() -> None:
    """generation_config.json of fine-tunes may list ids of tokens that the tokenizer has lost."""
    assert start(GrammarCompiler(byte_level(), 512, {1, 450}), choice=["a"])


def test_parentheses_that_mean_themselves_are_not_counted(compiler: GrammarCompiler) -> None:
    assert start(compiler, regex=r"\(" * 70 + "[(((]" * 30)
    assert start(compiler, grammar='root ::= "' + "(" * 70 + '"')


def test_what_is_kept_is_bounded(compiler: GrammarCompiler) -> None:
    for i in range(MAX_KEPT_GRAMMARS + 10):
        start(compiler, choice=[f"text {i}"])
    assert compiler._grammar.cache_info().currsize == MAX_KEPT_GRAMMARS
    assert len(compiler._matchers) <= 16
