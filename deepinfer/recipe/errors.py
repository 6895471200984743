"""Refused requests.  Both are ValueErrors; the server turns them into its protocol's error body."""


class RequestError(ValueError):
    """The request body has the wrong shape: bad JSON, a missing field, a wrong type, an unknown enum value.

    ``param`` is the path of the field ("" for the body itself); ``status_code`` is the HTTP status to answer with.
    """

    def __init__(self, message: str, param: str = "", status_code: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status_code = status_code


class ConversionError(RequestError):
    """The body is well formed, but what it asks for is refused.

    ``path`` is the field's path in the request where ``param``, which the public package words, says less.
    """

    path = ""

    def at(self, path: str) -> "ConversionError":
        """The same error, with the path of the value at fault."""
        self.path = path
        return self
