"""What a run logged: one file, and those of a run that was resumed."""

from diffvision.analysis.curves import Curve, keep_metrics, read_metrics

HEAD = "epoch,step,loss,val,data/seen"


def write(path, *rows):
    path.write_text("".join(f"{row}\r\n" for row in rows), newline="")


def test_metrics_of_lightnings_logger(tmp_path):
    write(tmp_path / "metrics.csv", "epoch,step,train/loss,val/acc", "0,9,2.5,", "0,9,,0.25", "0,19,1.5,")
    assert read_metrics(tmp_path) == {"train/loss": Curve([9, 19], [2.5, 1.5]), "val/acc": Curve([9], [0.25])}


def test_a_resumed_run_is_read_from_all_of_its_files(tmp_path):
    """Resumed at step 20, eleven times, and at step 50; steps after those were made again."""
    write(tmp_path / "metrics.csv", HEAD, "0,9,9.0,,", "0,19,8.0,,", "0,19,,0.5,", "0,19,,,640", "1,29,7.5,,")
    for number in range(11):
        keep_metrics(tmp_path)
        write(tmp_path / "metrics.csv", HEAD, f"0,19,{number},,", "1,29,7.0,,", "1,49,6.0,,", "1,49,,,640")
    keep_metrics(tmp_path)
    (tmp_path / "metrics.csv").write_text("epoch,step,loss\n2,49,5.0\n2,59,4.0\n2,69,3")  # killed while it wrote
    curves = read_metrics(tmp_path)
    assert curves["loss"] == Curve([9, 19, 29, 49, 59], [9.0, 10.0, 7.0, 5.0, 4.0])
    assert curves["val"] == Curve([19], [0.5])
    assert curves["data/seen"] == Curve([19, 49], [640, 640])


def test_an_epoch_that_was_ended_twice_has_one_account(tmp_path):
    """By max_steps 30, within the second epoch, and then by more of them."""
    write(tmp_path / "metrics.1.csv", "epoch,step,data/seen", "0,19,640", "1,29,320")
    write(tmp_path / "metrics.csv", "epoch,step,data/seen", "1,39,640", "2,59,640")
    assert read_metrics(tmp_path)["data/seen"] == Curve([19, 39, 59], [640, 640, 640])
