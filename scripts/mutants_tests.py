"""The tests that `mutants.py` runs for each module."""

from __future__ import annotations

_STEP = "test_step_parity.py test_no_host_read.py test_skip_leaves_no_trace.py"
_FIELD = "test_gradient_penalty.py test_field_cases.py test_several_optimizers.py"
TESTS: dict[str, tuple[str, ...]] = {
    "step": (_STEP, f"test_scaler_policy.py {_FIELD}"),
    "scaler": ("test_scaler_policy.py test_no_host_read.py", f"{_STEP} {_FIELD}"),
    "gradients": ("test_scaler_policy.py test_float16_range.py", f"{_STEP} {_FIELD}"),
    "buffers": (_STEP, f"test_attacks.py test_evaluate.py {_FIELD}"),
    "ema": (
        "test_on_gpu_by_reading.py test_skip_leaves_no_trace.py",
        "test_evaluation_weights.py test_attacks.py test_several_optimizers.py",
    ),
    "learning_rate": ("test_schedule_resume.py", "test_resume_changes.py"),
    "order": ("test_data_loading.py", "test_attacks.py"),
    "store": (
        "test_checkpoint_store.py test_asynchronous_save.py",
        "test_live_run.py::test_what_a_run_gives_up_while_it_is_read_is_no_damage "
        "test_fsdp.py::test_old_folders_are_removed_whole_and_nothing_temporary_is_left "
        "test_checkpoint_file.py test_run_files.py",
    ),
    "index": ("test_checkpoint_store.py", "test_checkpoint_file.py test_run_files.py"),
    "file": (
        "test_checkpoint_file.py test_foreign_files.py",
        "test_checkpoint_store.py test_run_files.py",
    ),
    "trust": ("test_recipe_trust.py", "test_eval.py::test_a_strangers_checkpoint_needs_trust"),
    "validate": ("test_recipe_load.py", "test_recipe_target.py test_mistakes.py"),
    "ranks": (
        "test_collectives.py",
        "test_ranks.py::test_dd1_every_rank_starts_with_the_scale_of_the_first "
        "test_ranks.py::test_dd3_a_gradient_that_ddp_does_not_reduce_is_skipped_on_every_rank",
    ),
    "restore": (
        "test_parameter_order.py test_resume_changes.py",
        "test_resume_exact.py::test_data_of_another_length_is_refused "
        "test_current_folder.py::test_what_the_user_names_beside_it_is_imported "
        "test_run_files.py::test_c7_a_run_may_be_copied_moved_and_go_on_elsewhere "
        "test_run_files.py::test_c7_a_run_that_an_older_ampctl_began_goes_on "
        "test_fsdp.py::test_parameters_in_another_order_get_their_own_part_of_the_optimizers_state",
    ),
}
"""The fast tests of each module, which is found by its name wherever in ampctl/ it stands.

Those of the second part run where the first has missed a mutant.
"""

TOO_LONG = (
    "test_field_cases.py::test_sa2_the_schedule_counts_optimizer_steps_whatever_the_micro_batch",
    "test_field_cases.py::test_sa6_a_tail_window_weighs_the_same_after_resuming",
    "test_field_cases.py::test_rs14_a_checkpoint_does_not_know_of_torch_compile",
    "test_field_cases.py::test_ac8_channels_last_learns_the_same",
    "test_asynchronous_save.py::test_a_file_holds_the_state_of_its_step_although_training_goes_on",
    "test_checkpoint_store.py::test_ck2_a_kill_while_a_run_goes_back_leaves_it_at_one_of_its_checkpoints",
    "test_run_files.py::test_c3_",
    "test_run_files.py::test_c5_",
    "test_several_optimizers.py::test_a_run_with_two_optimizers_resumes_exactly",
    "test_several_optimizers.py::test_parts_that_a_task_calls_are_compiled_one_by_one",
    "test_recipe_load.py::test_any_plain_values_survive_being_written_and_read",
    "test_recipe_load.py::test_yc1_a_text_field_keeps_the_raw_text",
    "test_recipe_load.py::test_an_alias_bomb_is_refused_in_words",
    "test_recipe_load.py::test_a_stored_recipe_that_attacks_is_literal_or_refused",
    "test_wrong_content.py::test_anything_wrong_anywhere_is_told_or_changes_nothing",
)
"""Tests of those files, or what the names of several begin with, that take seconds and see little
that the others do not."""
