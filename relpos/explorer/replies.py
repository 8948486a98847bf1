"""Requests and replies as JSON: bounded, and without numbers that JSON does not have."""

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from relpos.explorer import limits


class Json(JSONResponse):
    """JSON in which tensors are lists, and what is not finite is null."""

    def render(self, content: Any) -> bytes:
        return json.dumps(plain(content), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def plain(value: Any) -> Any:
    """A value as JSON has it: tensors and arrays as lists, NaN and infinities as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


async def read_json_body(request: Request) -> dict[str, Any]:
    """The body of a request, which is an object.

    Raises:
        HTTPException: It is too long, or another kind of data.
    """
    if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
        raise HTTPException(415, "the body must be JSON: send Content-Type: application/json.")
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > limits.BODY_BYTES:
            raise HTTPException(413, f"the request has more than {limits.BODY_BYTES:,} bytes: shorten the text.")
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise HTTPException(400, "the body must be a JSON object.")
    return body


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a number that JSON has.")
