"""Options of the server. Those of the engine are in `forkpoint.config`. Names follow vLLM where vLLM has the option."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forkpoint.checks import Checker, is_ipv6, is_text, json_value, option
from forkpoint.config import mapping_option
from forkpoint.errors import ConfigError
from forkpoint.json_options import json_object
from forkpoint.params import MAX_LOGPROBS

MIB = 2**20
_CHECK = Checker(ConfigError)
NOT_NEGATIVE = ("max_stored_responses", "max_stored_responses_bytes", "shutdown_timeout_s", "sse_keep_alive_interval")
FOR_ORIGINS, CORS = ("allowed_methods", "allowed_headers", "allow_credentials"), "allowed_origins too"
HTTPS, ORIGINS = "HTTPS options", "options for pages of other origins (CORS)"
MEDIA_DOMAINS = "HOST, HOST:PORT or HOST:* for any port, without scheme and path"
LISTS = ("allowed_hosts", "allowed_origins", "allowed_methods", "allowed_headers", "allowed_media_domains")
IN_ANSWERS = ("served_model_name", "response_role")
REPORTS = "log and metrics options"
OF_BATCHES = (  # options that say how requests are read and answered, of a server that answers one file of them
    *("allowed_media_domains", "chat_template_content_format", "default_chat_template_kwargs", "drop_billing_lines"),
    *("disable_log_stats", "enable_force_include_usage", "enable_prompt_tokens_details", "max_logprobs"),
    *("reasoning_parser", "response_role", "return_tokens_as_token_ids", "scheduling_policy", "served_model_name"),
    "tool_call_parser",
)
PREFIX = "letters, digits, '_' and ':', not starting with a digit"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All options of the server. Raises ConfigError naming the option, what was given, and what is allowed."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    uds: str | None = option(
        None, "listen on a Unix socket at this path instead; a stale one is replaced", metavar="PATH"
    )
    root_path: str = option("", "path under which a proxy shows the server, such as /models", metavar="PATH")
    api_key: tuple[str, ...] = option((), "keys that requests must show one of (also: FORKPOINT_API_KEY)")
    allowed_hosts: tuple[str, ...] = option(
        (), "hosts that requests may name; default: any, but loopback ones alone on a loopback address without keys"
    )
    cache_salt_per_key: bool | None = option(
        None, "keep the cached prompts of each API key apart from those of the others; default: on with several keys"
    )
    enable_prompt_tokens_details: bool = option(
        True, "report in answers how much of a prompt was cached, and why not more"
    )
    scheduling_policy: Literal["fcfs", "priority"] = option(
        "fcfs", "'priority': requests may name their priority, which 'fcfs' ignores"
    )
    served_model_name: tuple[str, ...] = option((), "names of the model in the API; default: as given to serve")
    ssl_certfile: str | None = option(None, "PEM file of a certificate: serve HTTPS", metavar="PATH", group=HTTPS)
    ssl_keyfile: str | None = option(
        None, "PEM file of its key, without a password, where that is not in the same file", metavar="PATH", group=HTTPS
    )
    ssl_ca_certs: str | None = option(
        None,
        "PEM file of authorities: clients must show a certificate that one of them has signed",
        metavar="PATH",
        group=HTTPS,
    )
    ssl_cert_reqs: int | None = option(
        None,
        "whether clients must show a certificate: 0 no, 1 if they like, 2 yes; default: 2 with ssl_ca_certs",
        group=HTTPS,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "origins whose pages may call the server from a browser (CORS), such as https://chat.example.org; '*': all",
        group=ORIGINS,
    )
    allowed_methods: tuple[str, ...] = option(("*",), "HTTP methods that such pages may use", group=ORIGINS)
    allowed_headers: tuple[str, ...] = option(("*",), "request headers that such pages may send", group=ORIGINS)
    allow_credentials: bool = option(False, "let such pages send cookies and HTTP authentication", group=ORIGINS)
    allowed_media_domains: tuple[str, ...] = option(
        (), "hosts from which images are fetched that a request names by URL; default: none"
    )
    max_body_bytes: int = option(32 * MIB, "largest request body, in bytes; larger ones are refused")
    max_open_requests: int = option(4096, "most completions served at once; further requests are refused")
    shutdown_timeout_s: float = option(30.0, "seconds that open requests are given after Ctrl-C or SIGTERM")
    tool_call_parser: Literal[
        "auto",
        "hermes",
        "qwen3_coder",
        "qwen3_json",
        "qwen3_xml",
        "glm45",
        "glm47",
        "granite4",
        "granite",
        "jamba",
        "kimi_k2",
        "lfm2",
        "ling3",
        "llama3_json",
        "mistral",
        "nemotron_json",
        "olmo3",
        "pythonic",
        "none",
    ] = option(
        "auto",
        "the notation of tool calls, by vLLM's name; auto: that of the chat template; none leaves calls in the text",
    )
    reasoning_parser: Literal[
        "auto",
        "qwen3",
        "deepseek_r1",
        "kimi_k2",
        "nano_v3",
        "nemotron_v3",
        "olmo3",
        "ling3",
        "glm45",
        "glm47",
        "minicpmv",
        "none",
    ] = option("auto", "separate <think> parts from the answer; none leaves them in it; vLLM's names all mean auto")
    sse_keep_alive_interval: float = option(
        15.0,
        "send a comment in a stream after this many seconds of silence; 0: never. It may come before the first token, "
        "and errors then come in the stream",
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        "auto", "pass content to the chat template as a string, or as a list of parts (openai); auto: as it expects"
    )
    default_chat_template_kwargs: Mapping[str, Any] = mapping_option(
        ': variables of the chat template, such as {"enable_thinking": false}'
    )
    drop_billing_lines: bool = option(
        True, "remove the lines 'x-anthropic-billing-header: ...' that Claude Code writes at the head of system prompts"
    )
    response_role: str = option("assistant", "role in the answers of chat completions")
    max_logprobs: int = option(MAX_LOGPROBS, "most log-probabilities that a request may ask for at each token")
    return_tokens_as_token_ids: bool = option(
        False, "log-probabilities have `token_id:ID` in place of each token's text, unless a request says otherwise"
    )
    enable_force_include_usage: bool = option(False, "end every stream with its usage, even if it was not asked for")
    max_stored_responses: int = option(1024, "responses of /v1/responses kept for later requests; 0 keeps none")
    max_stored_responses_bytes: int = option(64 * MIB, "memory for stored responses, in bytes")
    metrics_prefix: str = option(
        "forkpoint_", "prefix of the names under /metrics; 'vllm:' suits vLLM's dashboards", group=REPORTS
    )
    log_interval_s: float = option(
        10.0,
        "seconds between log lines that sum up the load; an idle server writes them at log level debug only",
        group=REPORTS,
    )
    disable_log_stats: bool = option(False, "do not log the load", group=REPORTS)
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = option(
        "warning", "log level of uvicorn, the HTTP library", group=REPORTS
    )
    access_log: bool = option(False, "log every request", group=REPORTS)
    enable_dev_endpoints: bool = option(False, "serve /reset_prefix_cache and /check_integrity")
    enable_tokenizer_info_endpoint: bool = option(
        False, "serve /tokenizer_info, which shows the chat template; clients that tokenise at the server ask for it"
    )

    def __post_init__(self) -> None:
        for name in LISTS:
            object.__setattr__(self, name, _listed(name, getattr(self, name)))
        variables = json_object("default_chat_template_kwargs", self.default_chat_template_kwargs)
        object.__setattr__(self, "default_chat_template_kwargs", variables)
        defaults = {name: field.default for name, field in self.__dataclass_fields__.items()}
        _CHECK.require(all(self.api_key), "api_key", "", "non-empty keys")
        for name, ok, allowed in (
            ("port", 0 <= self.port < 2**16, "an integer from 0 to 65535"),
            *((name, getattr(self, name) >= 1, "1 or more") for name in ("max_body_bytes", "max_open_requests")),
            *((name, getattr(self, name) >= 0, "0 or more") for name in NOT_NEGATIVE),
            ("max_logprobs", 0 <= self.max_logprobs <= MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}"),
            ("response_role", bool(self.response_role), "a role, such as assistant"),
            *((name, is_text("".join(getattr(self, name))), "valid Unicode") for name in IN_ANSWERS),
            ("log_interval_s", self.log_interval_s > 0, "a number above 0"),
            ("root_path", re.fullmatch(r"(/[^/\s?#]+)*", self.root_path), "/a/path"),
            ("metrics_prefix", re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", self.metrics_prefix), PREFIX),
            ("ssl_cert_reqs", self.ssl_cert_reqs in (None, 0, 1, 2), "0, 1 or 2"),
            ("ssl_cert_reqs", not self.ssl_cert_reqs or self.ssl_ca_certs is not None, "ssl_ca_certs too"),
            ("ssl_keyfile", self.ssl_certfile or self.ssl_keyfile is None, "it together with ssl_certfile"),
            ("ssl_ca_certs", self.ssl_certfile or self.ssl_ca_certs is None, "it together with ssl_certfile"),
            *((name, self.allowed_origins or getattr(self, name) == defaults[name], CORS) for name in FOR_ORIGINS),
        ):
            _CHECK.require(bool(ok), name, getattr(self, name), allowed)
        for origin in self.allowed_origins:
            ok = origin == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin) is not None
            _CHECK.require(ok, "allowed_origins", origin, "'*', or scheme://host[:port] without a path")

        domains = tuple(map(_media_domain, self.allowed_media_domains))
        object.__setattr__(self, "allowed_media_domains", domains)

    @property
    def salts_by_key(self) -> bool:
        if self.cache_salt_per_key is None:
            return len(self.api_key) > 1
        return self.cache_salt_per_key


def _listed(name: str, given: tuple[str, ...]) -> tuple[str, ...]:
    """Return the given texts. A text that is a JSON list, as vLLM takes them, is replaced by its elements.

    Raises ConfigError for elements that are not texts.
    """
    texts: list[str] = []
    for text in given:
        _CHECK.require(is_text(text), name, text, "texts, or one JSON list of texts")
        is_address = re.match(r"\[[\da-f.]*:[\da-f:.]+\]", text.lower())  # IPv6, with or without a port
        if not text.startswith("[") or is_address:
            texts.append(text)
            continue
        listed = json_value(text, [None])
        _CHECK.require(all(isinstance(item, str) for item in listed), name, text, "texts, or one JSON list of texts")
        texts += listed
    return tuple(texts)


def _media_domain(given: str) -> str:
    """Return a host's name or address in lower case, with its port if given. Raises ConfigError for other texts."""
    domain = given.lower()
    if not is_ipv6(domain):
        found = re.fullmatch(r"([\w.-]+|\[[^]]+\])(?::(\*|\d{1,5}))?", domain)
        ok = found is not None and (found[1][0] != "[" or is_ipv6(found[1][1:-1]))
        ok = ok and found is not None and (found[2] in (None, "*") or 0 < int(found[2]) < 1 << 16)
        _CHECK.require(ok, "allowed_media_domains", given, MEDIA_DOMAINS)
    return domain
