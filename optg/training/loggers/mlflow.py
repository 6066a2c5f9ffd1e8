"""`optg train --log mlflow`: MLflow. Its own variables apply, such as MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

from typing import Any

from optg.files import atomic_file
from optg.training.loggers.base import Logger


class MLflow(Logger):
    name = "mlflow"
    package = "mlflow"
    hint = "Set MLFLOW_TRACKING_URI to the address of a server, or `pip install mlflow` for a local database"

    def start(self, run: str, settings: dict[str, Any]) -> None:
        import mlflow

        file = self.folder / "mlflow-run-id"
        known = file.read_text().strip() if file.exists() else None
        self.id = mlflow.start_run(run_id=known, run_name=None if known else run).info.run_id
        if not known:
            with atomic_file(file) as new:
                new.write(self.id.encode())
            mlflow.log_params(settings)
        history = mlflow.MlflowClient().get_metric_history(self.id, "loss") if known else []
        self.last = max((point.step for point in history), default=0)  # the last epoch that MLflow has

    def log(self, epoch: int, metrics: dict[str, float]) -> None:
        import mlflow

        if epoch > self.last:
            mlflow.log_metrics(metrics, step=epoch, run_id=self.id)

    def finish(self) -> None:
        import mlflow

        mlflow.end_run()
