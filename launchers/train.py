"""What `deepspeed launchers/train.py RECIPE --node K --hub HOST:PORT` starts in each rank of a node."""

from spes_mega.node.main import main

if __name__ == "__main__":
    main()
