"""Calls that leave the machine: made with requests, imported only here and only when one is made."""

from __future__ import annotations

from collections.abc import Mapping

TIMEOUT = (3.05, 5.0)  # s to connect, s between bytes


def llm_trouble(llm: Mapping[str, str]) -> str | None:
    """What keeps the LLM from answering, in words without its key, or None. Proxies of the environment are honoured."""
    base = llm.get("TDAI_LLM_BASE_URL", "")
    if not base:
        return "LLM not configured"
    import requests  # noqa: PLC0415  (107-130 ms: only who asks for it pays)

    try:
        answer = requests.get(
            base.rstrip("/") + "/models",
            headers={"Authorization": f"Bearer {llm.get('TDAI_LLM_API_KEY', '')}"},
            timeout=TIMEOUT,
            stream=True,
        )
        answer.close()
    except requests.RequestException as error:
        return f"LLM unreachable at {base}: {type(error).__name__}"
    if answer.status_code in (401, 403) or answer.status_code >= 500:
        return f"LLM at {base} answers HTTP {answer.status_code}"
    return None
