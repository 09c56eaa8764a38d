"""Train an md.Program with Ray Train: python ray_train.py train.py --mesh data=4,model=8 --workers 4 --gpus 8

Ray starts a worker per host, and all of them again when one fails; they resume from the newest checkpoint. JaxTrainer
joins the workers, and ``Session`` plans the step for the devices of all and trains with that plan.
"""

import argparse

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer


def train(options):
    """What every worker does, in a process that has joined the others."""
    import runpy
    from pathlib import Path

    import meshdsl as md
    from meshdsl.training.loop import Run
    from meshdsl.training.run import Session

    program = runpy.run_path(options["program"])["program"]
    run = Run(options["steps"], Path(options["folder"]), options["save_every"])
    outcome = Session(program, md.Mesh.parse(options["mesh"])).train(run)
    if outcome.stopped:  # by SIGTERM, since its machine is to go: the state is saved
        raise RuntimeError(f"stopped after step {outcome.done}")


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
    JaxTrainer(
        train,
        train_loop_config=vars(options),
        jax_config=JaxConfig(use_gpu=True),  # which joins workers on CPU, too
        scaling_config=ScalingConfig(
            num_workers=options.workers,
            use_gpu=options.gpus > 0,
            resources_per_worker={"GPU": options.gpus} if options.gpus else {"CPU": 1},
        ),
        run_config=RunConfig(
            name="train", storage_path=options.folder, failure_config=FailureConfig(options.max_failures)
        ),
    ).fit()
