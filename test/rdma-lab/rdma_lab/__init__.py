"""Soft-RoCE guests for tests: see docs/rdma-lab.md."""
