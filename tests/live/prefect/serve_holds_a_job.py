"""``python serve_holds_a_job.py``: a flow served by a runner of its own, to be killed with it."""

from flows_to_deploy import holds_a_job

if __name__ == "__main__":
    holds_a_job.serve(name="served")
