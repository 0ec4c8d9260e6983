"""Calls that leave the machine: made with requests, imported only here and only when one is made.

Invariants: one call each, bounded by TIMEOUT; proxies of the environment are honoured; a key goes into the
Authorization header and into no message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TIMEOUT = (3.05, 10.0)  # s to connect, s between bytes
QUOTED = 200  # characters of an error answer that are quoted


def llm_trouble(llm: Mapping[str, str]) -> str | None:
    """What keeps the LLM from answering, in words without its key, or None."""
    base, key = llm.get("TDAI_LLM_BASE_URL", ""), llm.get("TDAI_LLM_API_KEY", "")
    if not base:
        return "LLM not configured"
    answer = _call("GET", base, "/models", key, None, None)
    if isinstance(answer, str):
        return f"LLM {answer}"
    if answer.status_code in (401, 403) or answer.status_code >= 500:
        return f"LLM at {base} answers HTTP {answer.status_code}"
    return None


def check_llm(base: str, key: str, model: str, proxy: str | None) -> str | None:
    """One chat completion of one token; the cause with its HTTP code where it fails, or None."""
    if not base or not model:
        return "cannot check the LLM: llm.baseUrl and llm.model are needed"
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "ping"}]}
    return _fault("LLM", base, _call("POST", base, "/chat/completions", key, body, proxy))


def check_embedding(base: str, key: str, model: str, proxy: str | None) -> str | None:
    """One embedding of one word; the cause with its HTTP code where it fails, or None."""
    if not base or not model:
        return "cannot check the embedding: memory.embedding.baseUrl and model are needed"
    return _fault("embedding", base, _call("POST", base, "/embeddings", key, {"model": model, "input": "ping"}, proxy))


def _call(method: str, base: str, path: str, key: str, body: Any, proxy: str | None) -> Any:
    """The response, or in words why there is none."""
    import requests  # noqa: PLC0415  (107-130 ms: only who asks for it pays)

    url = base.rstrip("/") + path
    try:
        return requests.request(
            method,
            url,
            headers={"Authorization": f"Bearer {key}"},
            json=body,
            timeout=TIMEOUT,
            proxies={"http": proxy, "https": proxy} if proxy else None,
            allow_redirects=False,
        )
    except (requests.RequestException, UnicodeError) as error:
        return f"unreachable at {url}: {type(error).__name__}"


def _fault(what: str, base: str, answer: Any) -> str | None:
    if isinstance(answer, str):
        return f"cannot check the {what}: {answer}"
    if answer.status_code == 200:
        return None
    said = " ".join(answer.text[:QUOTED].split())
    return f"cannot check the {what}: {base} answers HTTP {answer.status_code}" + (f": {said}" if said else "")
