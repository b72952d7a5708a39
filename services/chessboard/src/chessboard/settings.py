"""What only chessboard can be told by its environment."""

from datetime import timedelta

from pydantic import Field, field_validator

from chassis.settings import Duration, ServiceSettings
from chessboard.domain import ExpirationLimits


class ChessboardSettings(ServiceSettings):
    """Settings of chessboard (see `chassis.settings` for the common ones).

    Attributes:
        hold_grace: time after a hold's own in which its release is left to CRM (seconds, or ISO 8601 such as PT10M).
        job_property_object_hold_expiration_interval: seconds from cycle to cycle, a day at most.
        job_property_object_hold_expiration_batch_size: objects of one phase and cycle, 1..1000.
        job_property_object_hold_expiration_report_only: free nothing; log and measure what would be freed.
        job_property_object_hold_expiration_silence: for how long CRM must have released nothing to count as silent.
        job_project_aggregates_recalc_interval: seconds from cycle to cycle, a day at most.
        job_project_aggregates_recalc_batch_size: projects of one transaction, 1..1000.
        job_project_aggregates_recalc_debounce: how long a project's first request waits for others.
    """

    http_port: int = Field(default=8102, ge=0, le=65535)
    hold_grace: Duration = timedelta(minutes=10)
    job_property_object_hold_expiration_interval: float = Field(default=60.0, gt=0, le=86_400)
    job_property_object_hold_expiration_batch_size: int = 200
    job_property_object_hold_expiration_report_only: bool = False
    job_property_object_hold_expiration_silence: Duration = Field(
        default=timedelta(minutes=30), gt=timedelta(0), le=timedelta(days=7)
    )
    job_project_aggregates_recalc_interval: float = Field(default=10.0, gt=0, le=86_400)
    job_project_aggregates_recalc_batch_size: int = Field(default=200, ge=1, le=1000)
    job_project_aggregates_recalc_debounce: Duration = Field(
        default=timedelta(seconds=30), ge=timedelta(0), le=timedelta(hours=1)
    )

    @field_validator("hold_grace")
    @classmethod
    def _grace_is_in_range(cls, value: timedelta) -> timedelta:
        return ExpirationLimits(batch_size=1, hold_grace=value).hold_grace

    @field_validator("job_property_object_hold_expiration_batch_size")
    @classmethod
    def _batch_size_is_in_range(cls, value: int) -> int:
        return ExpirationLimits(value, timedelta(minutes=10)).batch_size

    def expiration_limits(self) -> ExpirationLimits:
        """Return how much one cycle of property-object-hold-expiration may free, and after which grace."""
        return ExpirationLimits(self.job_property_object_hold_expiration_batch_size, self.hold_grace)
