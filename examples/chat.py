"""A chat client for a running server, with nothing but Python's standard library.

VLLM_ATTENTION_BACKEND=ZIPFUSION vllm serve MODEL --dtype bfloat16       # in another terminal
python examples/chat.py "What is the capital of France?" [http://127.0.0.1:8000]
"""

import json
import sys
import urllib.request
from typing import Any


def call(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """GET, or POST of ``body`` as JSON. Raises urllib.error.URLError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit('usage: python examples/chat.py "a question" [URL]')
    url = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"
    model = call(f"{url}/v1/models")["data"][0]["id"]
    messages = [{"role": "user", "content": sys.argv[1]}]
    answer = call(f"{url}/v1/chat/completions", {"model": model, "messages": messages, "temperature": 0})
    print(answer["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
