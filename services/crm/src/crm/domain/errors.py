"""What every broken rule of the domain is: an error whose text is safe to show."""


class DomainError(Exception):
    """A rule of the domain was broken; the text is safe to show."""


class ValidationError(DomainError, ValueError):
    """An input is outside its range; nothing was read or changed."""
