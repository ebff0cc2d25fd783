"""What a client is told when something is wrong: one exception, one JSON shape."""

from __future__ import annotations

import msgspec

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class RequestError(Exception):
    """An answer other than success.

    Args:
        status: HTTP status; inside a stream, where it can no longer be sent, `code` has to do.
        code: stable identifier, for example `model_not_found`.
        message: what is wrong and what to do; never prompt text, never internals.
        param: the request field at fault, as a path such as `messages[0].content`.
        retry_after: seconds for the Retry-After header; 0 = none.
    """

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None, retry_after: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with the status."""
        headers = {}
        if self.retry_after:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def body(self) -> bytes:
        """The OpenAI error object as JSON."""
        fallback = "invalid_request_error" if self.status < 500 else "server_error"
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, fallback),
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


def invalid(message: str, param: str | None = None) -> RequestError:
    """400: a field has a wrong type or value."""
    return RequestError(400, "invalid_value", message, param=param)


def over_context(message: str, param: str) -> RequestError:
    """400: more tokens than the context has."""
    return RequestError(400, "context_length_exceeded", message, param=param)


def unsupported(param: str, message: str = "") -> RequestError:
    """400: a field of the OpenAI interface that is not implemented, with a value that asks for it."""
    return RequestError(400, "unsupported_parameter", message or f"'{param}' is not supported", param=param)


def internal() -> RequestError:
    """500 without any detail; the detail is in the log."""
    return RequestError(500, "internal_error", "internal error; the log of the api process has the details")
