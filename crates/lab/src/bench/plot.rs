//! Pictures of `tight`: throughput by row and subject, and what a jump does to
//! it over time. Pure: results in, SVG out.

use super::{
    cells::Subject,
    rows::{Matrix, Row, speed},
};
use crate::{
    drawing::{Drawing, colour},
    keys::Pattern,
    table::short,
};
use std::fmt::Write;

const WIDTH: f64 = 1100.0;
const MARGIN: f64 = 40.0;
/// Where bars begin: names stand before.
const LEFT: f64 = 390.0;
/// Room behind the longest bar for its caption.
const CAPTION: f64 = 130.0;
const BAR: f64 = 20.0;
const GAP: f64 = 16.0;
const TOP: f64 = 140.0;
/// Strata's rows after the first are lighter, in this order.
const LIGHTER: [(Subject, f64); 2] =
    [(Subject::StrataAsMemtierd, 0.7), (Subject::StrataThird, 0.45)];
/// Width of a step of the timeline: ticks are shorter and jitter.
const STEP_SECONDS: f64 = 0.5;
const PLOT_HEIGHT: f64 = 300.0;

/// Those for which something was measured.
pub(super) fn pictures(matrix: &Matrix) -> Vec<(&'static str, String)> {
    let mut pictures = Vec::new();
    if matrix.rows.iter().any(|row| !row.results.is_empty()) {
        pictures.push(("throughput", throughput(matrix)));
    }
    let jumps: Vec<Vec<&Row>> =
        matrix.cells().into_iter().filter(|rows| rows[0].cell.pattern == Pattern::Jump).collect();
    if let Some(rows) = jumps.first() {
        pictures.push(("jump", jump(rows, &matrix.source)));
    }
    pictures
}

fn opacity(subject: Subject) -> f64 {
    LIGHTER.iter().find(|(lighter, _)| *lighter == subject).map_or(1.0, |(_, opacity)| *opacity)
}

fn throughput(matrix: &Matrix) -> String {
    let cells = matrix.cells();
    let bars: usize = cells.iter().map(Vec::len).sum();
    let height = TOP + bars as f64 * BAR + cells.len() as f64 * GAP + 40.0;
    let mut drawing = Drawing::new(WIDTH, height);
    drawing.text(MARGIN, 48.0, "h", "Redis squeezed: throughput");
    let legend = [
        "Operations per second, medians; behind each bar: of DRAM only. The thin line spans lowest \
         to highest.",
        "Black mark: the bound, which the best fixed set of pages would reach at the measured \
         price of a fault.",
        "Percentages: what the rivals may keep resident, their compressed store extra; Strata's \
         total is theirs.",
    ];
    for (line, text) in legend.iter().enumerate() {
        drawing.text(MARGIN, 74.0 + 20.0 * line as f64, "s", text);
    }
    let highest = |row: &&Row| row.spread(speed).map_or(0.0, |found| found.highest);
    let largest = cells.iter().flatten().map(highest).fold(f64::MIN_POSITIVE, f64::max);
    let scale = (WIDTH - LEFT - CAPTION - MARGIN) / largest;
    let mut y = TOP;
    for rows in &cells {
        drawing.text(MARGIN, y + 14.0, "l", &rows[0].cell.name());
        let base = rows[0].spread(speed).map_or(f64::NAN, |found| found.median);
        for row in rows {
            let Some(found) = row.spread(speed) else { continue };
            drawing.text(LEFT - 10.0, y + 14.0, "n e", row.subject.name());
            let at = |rate: f64| LEFT + rate * scale;
            drawing.put(&format!(
                "<rect x=\"{LEFT:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\" \
                 fill-opacity=\"{}\"/>",
                y + 3.0,
                found.median * scale,
                BAR - 5.0,
                colour(row.subject.kind()),
                opacity(row.subject)
            ));
            let middle = y + BAR / 2.0 + 0.5;
            drawing.line((at(found.lowest), middle), (at(found.highest), middle), "#0f172a", 1.2);
            let mut end = found.highest;
            if let Some(bound) = matrix.bound(row).filter(|bound| *bound <= 1.1 * largest) {
                drawing.line((at(bound), y + 1.0), (at(bound), y + BAR - 1.0), "#000000", 2.5);
                end = end.max(bound);
            }
            let share = if row.subject == Subject::Native {
                String::new()
            } else {
                format!(" · {:.2} ×", found.median / base)
            };
            let caption = format!("{}{share}", short(found.median));
            drawing.text(at(end) + 7.0, y + 15.0, "v", &caption);
            y += BAR;
        }
        y += GAP;
    }
    drawing.text(MARGIN, y + 14.0, "n", &matrix.source);
    drawing.finish()
}

/// Mean rate by step over all repetitions: (end of the step, rate).
fn steps(row: &Row) -> Vec<(f64, f64)> {
    let mut sums: Vec<(f64, u32)> = Vec::new();
    for (_, result) in &row.results {
        for (at, rate) in &result.run.timeline {
            let step = (at / STEP_SECONDS) as usize;
            if sums.len() <= step {
                sums.resize(step + 1, (0.0, 0));
            }
            sums[step].0 += rate;
            sums[step].1 += 1;
        }
    }
    let filled = sums.into_iter().enumerate().filter(|(_, (_, count))| *count > 0);
    filled
        .map(|(step, (sum, count))| ((step + 1) as f64 * STEP_SECONDS, sum / f64::from(count)))
        .collect()
}

fn jump(rows: &[&Row], source: &str) -> String {
    let height = TOP + PLOT_HEIGHT + 70.0;
    let mut drawing = Drawing::new(WIDTH, height);
    let title = format!("The hot set moves: {}", rows[0].cell.name());
    drawing.text(MARGIN, 48.0, "h", &title);
    let native = rows.iter().find(|row| row.subject == Subject::Native);
    let base = native.and_then(|row| row.spread(speed)).map_or_else(String::new, |found| {
        format!(" DRAM only, not drawn: {} ops/s.", short(found.median))
    });
    let text = format!(
        "Thousand operations per second, means over {STEP_SECONDS} s of all repetitions, warm-up \
         included.{base}"
    );
    drawing.text(MARGIN, 74.0, "s", &text);
    let lines: Vec<(&Row, Vec<(f64, f64)>)> = rows
        .iter()
        .filter(|row| row.subject != Subject::Native)
        .map(|row| (*row, steps(row)))
        .collect();
    let points = || lines.iter().flat_map(|(_, line)| line);
    let seconds = points().map(|point| point.0).fold(1.0, f64::max);
    let largest = points().map(|point| point.1).fold(1.0, f64::max);
    let (left, right) = (MARGIN + 46.0, WIDTH - MARGIN - 90.0);
    let x_of = |at: f64| left + at / seconds * (right - left);
    let y_of = |rate: f64| TOP + PLOT_HEIGHT * (1.0 - rate / largest);
    for quarter in 0..=4 {
        let rate = largest * f64::from(quarter) / 4.0;
        drawing.line((left, y_of(rate)), (right, y_of(rate)), "#e2e8f0", 1.0);
        let label = format!("{:.0}", rate / 1000.0);
        drawing.text(left - 8.0, y_of(rate) + 4.0, "n e", &label);
    }
    let mut second = 0.0;
    while second <= seconds {
        let label = format!("{second:.0} s");
        drawing.text(x_of(second) - 4.0, TOP + PLOT_HEIGHT + 18.0, "n", &label);
        second += 4.0;
    }
    let jumps = rows.iter().flat_map(|row| &row.results).filter_map(|(_, result)| result.run.jump);
    let (sum, count) = jumps.fold((0.0, 0u32), |(sum, n), jump| (sum + jump.at_seconds, n + 1));
    if count > 0 {
        let x = x_of(sum / f64::from(count));
        drawing.line((x, TOP), (x, TOP + PLOT_HEIGHT), "#dc2626", 1.5);
        drawing.text(x + 5.0, TOP + 12.0, "n", "a quarter of the keys further");
    }
    let last = |line: &[(f64, f64)]| line.last().map_or(0.0, |point| point.1);
    let mut lines = lines;
    lines.sort_by(|a, b| last(&b.1).total_cmp(&last(&a.1)));
    let mut label_bottom = f64::MIN;
    for (row, line) in &lines {
        let mut path = String::new();
        for (at, rate) in line {
            write!(path, "{:.1},{:.1} ", x_of(*at), y_of(*rate)).expect("a String takes all");
        }
        drawing.put(&format!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2.4\" \
             stroke-linejoin=\"round\"/>",
            path.trim_end(),
            colour(row.subject.kind())
        ));
        // Lines may end close to each other; their names may not.
        let y = (y_of(last(line)) + 4.0).max(label_bottom + 15.0);
        label_bottom = y;
        drawing.text(right + 10.0, y, "l", row.subject.name());
    }
    drawing.text(MARGIN, height - 18.0, "n", source);
    drawing.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::rows::tests::example;

    #[test]
    fn every_row_has_its_bar_and_nothing_is_without_a_place() {
        let matrix = example(Pattern::Jump);
        let pictures = pictures(&matrix);
        let names: Vec<&str> = pictures.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["throughput", "jump"]);
        for (name, svg) in &pictures {
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{name}: {svg}");
            assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count(), "{name}");
        }
        // The sheet, and a bar for each row.
        assert_eq!(pictures[0].1.matches("<rect").count(), 1 + matrix.rows.len());
        // A line for each row but DRAM only.
        assert_eq!(pictures[1].1.matches("<polyline").count(), matrix.rows.len() - 1);
    }

    #[test]
    fn without_results_there_is_no_picture() {
        assert!(pictures(&Matrix::default()).is_empty());
        assert_eq!(pictures(&example(Pattern::Uniform)).len(), 1);
    }
}
