"""What only crm can be told by its environment."""

from pydantic import Field, field_validator

from chassis.settings import ServiceSettings
from crm.domain import OverdueLimits


class CrmSettings(ServiceSettings):
    """Settings of crm (see `chassis.settings` for the common ones).

    Attributes:
        job_timeline_overdue_interval: seconds from cycle to cycle, a day at most.
        job_timeline_overdue_batch_size: rows of one transaction, 1..1000.
        job_timeline_overdue_max_batches: transactions of one cycle, 1..200.
        job_booking_expiration_interval: seconds from cycle to cycle, a day at most.
        job_booking_expiration_batch_size: bookings of one transaction, 1..1000.
        job_booking_answers_interval, job_booking_answers_batch_size: the same of booking-answers.
        job_booking_quotes_interval, job_booking_quotes_batch_size: the same of booking-quotes.
        job_timeline_overdue_single_runner: let one process at a time do a batch (a Postgres advisory lock).
    """

    http_port: int = Field(default=8101, ge=0, le=65535)
    job_timeline_overdue_interval: float = Field(default=300.0, gt=0, le=86_400)
    job_timeline_overdue_batch_size: int = 500
    job_timeline_overdue_max_batches: int = 20
    job_timeline_overdue_single_runner: bool = False
    job_booking_expiration_interval: float = Field(default=15.0, gt=0, le=86_400)
    job_booking_expiration_batch_size: int = Field(default=200, ge=1, le=1000)
    job_booking_answers_interval: float = Field(default=15.0, gt=0, le=86_400)
    job_booking_answers_batch_size: int = Field(default=200, ge=1, le=1000)
    job_booking_quotes_interval: float = Field(default=60.0, gt=0, le=86_400)
    job_booking_quotes_batch_size: int = Field(default=200, ge=1, le=1000)

    @field_validator("job_timeline_overdue_batch_size")
    @classmethod
    def _batch_size_is_in_range(cls, value: int) -> int:
        return OverdueLimits(batch_size=value, max_batches_per_cycle=1).batch_size

    @field_validator("job_timeline_overdue_max_batches")
    @classmethod
    def _max_batches_is_in_range(cls, value: int) -> int:
        return OverdueLimits(batch_size=1, max_batches_per_cycle=value).max_batches_per_cycle

    def overdue_limits(self) -> OverdueLimits:
        """Return how much one cycle of timeline-overdue may do."""
        return OverdueLimits(self.job_timeline_overdue_batch_size, self.job_timeline_overdue_max_batches)
