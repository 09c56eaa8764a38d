"""Train an md.Program with plain Ray actors: python ray_actors.py train.py --mesh data=4,model=8 --workers 4 --gpus 8

The actors join as processes of jax. When one fails all are started again, and resume from the newest checkpoint.
"""

import argparse
import socket

import ray


@ray.remote
class Worker:
    """A process of the run."""

    def address(self):
        """Where the others find process 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def train(self, address, index, options):
        """Joins the others and trains; returns the number of steps done."""
        import runpy
        from pathlib import Path

        import jax

        import meshdsl as md
        from meshdsl.training.loop import Run
        from meshdsl.training.run import Session

        jax.distributed.initialize(address, options.workers, index)
        program = runpy.run_path(options.program)["program"]
        run = Run(options.steps, Path(options.folder), options.save_every)
        outcome = Session(program, md.Mesh.parse(options.mesh)).train(run)
        if outcome.stopped:  # by SIGTERM, since its machine is to go: the state is saved
            raise RuntimeError(f"stopped after step {outcome.done}")
        return outcome.done


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--mesh", default="data=4,model=8")
    parser.add_argument("--steps", type=int, default=0, help="0: those of the program")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--folder", default="/shared/runs/train", help="that all workers see")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=8, help="per worker; 0: CPU")
    parser.add_argument("--max-failures", type=int, default=10)
    options = parser.parse_args()

    environment = {} if options.gpus else {"JAX_PLATFORMS": "cpu"}  # with JAX_NUM_CPU_DEVICES, per worker
    ray.init(runtime_env={"env_vars": environment})
    for failures in range(options.max_failures + 1):
        workers = [Worker.options(num_gpus=options.gpus, num_cpus=1).remote() for _ in range(options.workers)]
        address = ray.get(workers[0].address.remote())
        try:
            done = ray.get([worker.train.remote(address, i, options) for i, worker in enumerate(workers)])
            break
        except ray.exceptions.RayError as error:  # of the first that fails; the others wait for it
            if failures == options.max_failures:
                raise
            print(f"failure {failures + 1} of at most {options.max_failures}: {error}")
        finally:
            for worker in workers:
                ray.kill(worker)
    print(f"{done[0]} steps done")
