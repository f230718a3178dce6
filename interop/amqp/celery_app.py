"""What `celery -A` is pointed at by celery_worker.py; its settings come from the environment. Driver: Celery."""

import os

from interop.amqp.celery_tasks import make_app

app = make_app(os.environ["BROKER_URL"], os.environ["RESULT_BACKEND"], quorum=os.environ["QUEUE_TYPE"] == "quorum")
