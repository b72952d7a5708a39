"""What only crm can be told by its environment."""

from pydantic import Field, model_validator

from chassis.settings import ServiceSettings
from crm.domain import OverdueLimits


class CrmSettings(ServiceSettings):
    """Settings of crm (see `chassis.settings` for the common ones).

    Attributes:
        job_timeline_overdue_interval: seconds from cycle to cycle.
        job_timeline_overdue_batch_size: rows of one transaction, 1..1000.
        job_timeline_overdue_max_batches: transactions of one cycle, 1..200.
        job_timeline_overdue_single_runner: let one process at a time do a batch (a Postgres advisory lock).
    """

    http_port: int = Field(default=8101, ge=0, le=65535)
    job_timeline_overdue_interval: float = Field(default=300.0, gt=0)
    job_timeline_overdue_batch_size: int = 500
    job_timeline_overdue_max_batches: int = 20
    job_timeline_overdue_single_runner: bool = False

    @model_validator(mode="after")
    def _limits_are_in_range(self) -> "CrmSettings":
        self.overdue_limits()
        return self

    def overdue_limits(self) -> OverdueLimits:
        """Return how much one cycle of timeline-overdue may do.

        Raises:
            ValidationError: a number is outside its range.
        """
        return OverdueLimits(self.job_timeline_overdue_batch_size, self.job_timeline_overdue_max_batches)
