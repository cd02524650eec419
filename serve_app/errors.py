"""The one exception tree, and the HTTP answer that each leaf becomes.

ServeAppError
├── ConfigError                    start-up only: the server does not start
├── ModelError                     start-up only
│   ├── ModelNotFoundError         the weights are not where the configuration says
│   └── UnsupportedModelError      the loader's proof refused the model, with the reason
├── RequestError                   400  invalid_request_error, names the field in `param`
│   ├── ContextLengthError         400  code context_length_exceeded
│   ├── AuthenticationError        401  code invalid_api_key, with WWW-Authenticate
│   ├── UnknownModelError          404  code model_not_found
│   ├── UnknownRouteError          404
│   ├── MethodNotAllowedError      405
│   ├── RequestTimeoutError        408  the body did not arrive in time
│   ├── BodyTooLargeError          413
│   └── UnsupportedMediaTypeError  415
├── OverloadedError                429  rate_limit_error, with Retry-After
├── RequestCancelledError          499  the caller left or cancelled
│   └── SlowReaderError            499  the caller does not read his stream
├── DeadlineError                  504  not done in the time that the caller, or the server, allows
├── GenerationError                500  server_error: this request's own work, or its step, failed
│   └── OutOfMemoryError           500  its work does not fit into the device's memory, not even alone
└── EngineUnavailableError         503  the engine is dead, draining or not there
    └── ColdStartError             503  code cold_start, with Retry-After: it is being started

Every error survives pickling, since an error crosses from replica to ingress as a value. What a message says may be read
by the caller: internals belong in the log.
"""

from __future__ import annotations


class ServeAppError(Exception):
    """Root of the tree. `status` is the HTTP status; `type` and `code` are OpenAI's words for it."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class ConfigError(ServeAppError):
    """A setting is unknown or impossible; the message starts with the path of its key."""


class ModelError(ServeAppError):
    """The model cannot be served."""


class ModelNotFoundError(ModelError):
    """No weights where the configuration says they are."""


class UnsupportedModelError(ModelError):
    """The model loads, but cannot be served correctly; the message names the reason."""


class RequestError(ServeAppError):
    """The caller's mistake. `param` names the field."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(RequestError):
    """Prompt, or prompt plus requested tokens, is longer than the model's context."""

    code = "context_length_exceeded"


class AuthenticationError(RequestError):
    """No API key, or none that is known."""

    status = 401
    code = "invalid_api_key"


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"


class UnknownRouteError(RequestError):
    """No such path."""

    status = 404


class MethodNotAllowedError(RequestError):
    """The path exists, but not for this method."""

    status = 405


class RequestTimeoutError(RequestError):
    """The body did not arrive in time."""

    status = 408


class BodyTooLargeError(RequestError):
    """The body is larger than the configured limit."""

    status = 413


class UnsupportedMediaTypeError(RequestError):
    """The body is not declared as JSON."""

    status = 415


class RetryLaterError(ServeAppError):
    """The same may be asked again in `retry_after_s` seconds; base of those of which that is known."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.args = (message, retry_after_s)
        self.retry_after_s = retry_after_s


class OverloadedError(RetryLaterError):
    """More work is in sight than the budget admits; `retry_after_s` is computed from backlog and speed."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class RequestCancelledError(ServeAppError):
    """The caller left, or cancelled."""

    status = 499
    type = "cancelled"
    code = "cancelled"


class SlowReaderError(RequestCancelledError):
    """The caller has taken nothing of his stream for too long: it is cut off."""

    code = "slow_reader"


class DeadlineError(ServeAppError):
    """The time that the caller or the server allows is over; the work has ended."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class GenerationError(ServeAppError):
    """This request's own work, or the step it was in, failed. Others go on."""


class OutOfMemoryError(GenerationError):
    """A step does not fit into the device's memory. It is tried in halves; what does not fit alone ends with this."""


class EngineUnavailableError(ServeAppError):
    """The engine is dead, shutting down, or cannot be reached."""

    status = 503
    type = "service_unavailable"
    code = "engine_unavailable"


class ColdStartError(RetryLaterError, EngineUnavailableError):
    """There is no engine replica, and the start of one takes longer than calls may wait."""

    code = "cold_start"
