"""The plug-in that MindFormers loads: `run_mindformer.py --register_path` names this folder.

`telechat-moe plugin-path` prints its path. May import interop. Begin with `telechat_moe_plugin.py`.
"""
