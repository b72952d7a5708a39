"""What a process's consumers export; the label `consumer` is the group's name."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class ConsumerMetrics:
    """One instance per process and registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"pin_consumer_{name}_total", text, ["consumer", *labels], registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"pin_consumer_{name}", text, ["consumer", *labels], registry=registry)

        self.handled = counter("handled", "Events handled.", "type")
        self.duplicates = counter("duplicates", "Events that had been handled before.")
        self.ignored = counter("ignored", "Records of a type that this consumer has no handler for.")
        self.failures = counter("failures", "Failures by kind: infrastructure, contract, handler.", "kind")
        self.retries = counter("retries", "Further attempts at an event.")
        self.batches = counter("batches", "Batches by how they were handled: whole, one_by_one.", "mode")
        self.dead_letters = counter("dead_letters", "Records set aside.", "disposition")
        self.parked_keys = gauge("parked_keys", "Keys that wait behind an event that fails.")
        self.parked_records = gauge("parked_records", "Records of parked keys.")
        self.oldest_parked = gauge("oldest_parked_age_seconds", "Age of the oldest parked key.")
        self.paused = gauge("paused_partitions", "Partitions paused because too much is parked.")
        self.assigned = gauge("assigned_partitions", "Partitions of this member.")
        self.seconds = Histogram(
            "pin_consumer_batch_duration_seconds",
            "Duration of a batch, its commit included.",
            ["consumer"],
            registry=registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
        )
        self.age = Histogram(
            "pin_consumer_record_age_seconds",
            "Age of a record when it had been handled.",
            ["consumer"],
            registry=registry,
            buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300, 3600, 86400),
        )

    def declare(self, consumer: str) -> None:
        """Let every counter of a consumer exist from the start, so that its first increase is seen."""
        for kind in ("infrastructure", "contract", "handler"):
            self.failures.labels(consumer, kind)
        for disposition in ("quarantine", "refused", "exhausted", "parked"):
            self.dead_letters.labels(consumer, disposition)
        for plain in (self.duplicates, self.ignored, self.retries, self.parked_keys, self.paused, self.assigned):
            plain.labels(consumer)
