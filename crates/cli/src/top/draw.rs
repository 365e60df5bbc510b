//! Draws [`Model`] on a terminal of any size. Ratatui sends only the cells that
//! changed, so nothing flickers.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row as TableRow, Table, TableState};
use strata_api::TenantState;

use super::model::{Column, Model, Row};
use crate::show::short_size;

/// Cells of the bar that shows how much of its budget a tenant costs.
const BAR_CELLS: usize = 4;
/// Least width of the names; they get what the others leave.
const NAME_CELLS: u16 = 6;

/// Draws one frame.
pub(crate) fn draw(frame: &mut Frame<'_>, model: &mut Model) {
    let [head, table, detail, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Length(2),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    draw_head(frame, head, model);
    draw_table(frame, table, model);
    draw_detail(frame, detail, model);
    let keys = "q quit  ←→ sort  r reverse  ↑↓ select   N native M managed X exhausted";
    frame.render_widget(Paragraph::new(keys).dim(), foot);
}

fn draw_head(frame: &mut Frame<'_>, area: Rect, model: &Model) {
    let (budgets, dram) = model.totals();
    let count = model.rows().len();
    let tenants = if count == 1 { "tenant" } else { "tenants" };
    let (sort, reversed) = model.order();
    let text = format!(
        "strata top: {count} {tenants}, {} of {} budgeted DRAM, by {} {}",
        short_size(dram),
        short_size(budgets),
        sort.title(),
        if reversed { '↑' } else { '↓' }
    );
    frame.render_widget(Paragraph::new(text).bold(), area);
}

fn draw_table(frame: &mut Frame<'_>, area: Rect, model: &Model) {
    let (sort, _) = model.order();
    let heading = |column: Column| {
        let style = if column == sort { Style::new().bold().underlined() } else { Style::new() };
        aligned(column, column.title().to_owned()).style(style)
    };
    let columns = model.columns();
    let mut heads: Vec<Cell<'_>> = columns.iter().copied().map(heading).collect();
    heads.insert(1, Cell::new("S"));
    let rows = model.rows().iter().map(|row| {
        let mut cells: Vec<Cell<'_>> = columns.iter().map(|column| cell(row, *column)).collect();
        cells.insert(1, state(row.state));
        TableRow::new(cells)
    });
    let mut widths: Vec<Constraint> = columns.iter().copied().map(width).collect();
    widths.insert(1, Constraint::Length(1));
    let table = Table::new(rows, widths)
        .header(TableRow::new(heads).style(Style::new().reversed()))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut place = TableState::new().with_selected(model.selected_index());
    frame.render_stateful_widget(table, area, &mut place);
}

/// In all 80 cells with the state, the shortest name and the gaps.
fn width(column: Column) -> Constraint {
    match column {
        Column::Name => Constraint::Min(NAME_CELLS),
        Column::Use => Constraint::Length(BAR_CELLS as u16 + 5),
        Column::Budget | Column::Stored => Constraint::Length(6),
        _ => Constraint::Length(5),
    }
}

fn aligned(column: Column, text: String) -> Cell<'static> {
    match column {
        Column::Name | Column::Use => Cell::new(text),
        _ => Cell::new(Line::from(text).right_aligned()),
    }
}

fn cell(row: &Row, column: Column) -> Cell<'static> {
    match column {
        Column::Use => {
            let style = Style::new().fg(color(row.budget_use));
            let text = format!("{:>5}", row.cell(Column::Use));
            Cell::new(Line::from(vec![Span::styled(bar(row.budget_use), style), text.into()]))
        }
        _ => aligned(column, row.cell(column)),
    }
}

/// Filled in steps of an eighth of a cell.
fn bar(part: f64) -> String {
    const EIGHTHS: [char; 9] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉', '█'];
    let filled = (part.clamp(0.0, 1.0) * (BAR_CELLS * 8) as f64).round() as usize;
    (0..BAR_CELLS).map(|cell| EIGHTHS[filled.saturating_sub(cell * 8).min(8)]).collect()
}

/// A budget that is used up is what a budget is for; one that is exceeded by more
/// than Strata promises (2 %) is not.
fn color(part: f64) -> Color {
    match part {
        p if p > 1.02 => Color::Red,
        p if p > 0.9 => Color::Yellow,
        _ => Color::Green,
    }
}

fn state(state: TenantState) -> Cell<'static> {
    match state {
        TenantState::Starting => Cell::new("S").dim(),
        TenantState::Native => Cell::new("N").dim(),
        TenantState::Managed => Cell::new("M"),
        TenantState::Released => Cell::new("R").dim(),
        TenantState::Ended => Cell::new("E").dim(),
        TenantState::Exhausted => Cell::new("X").red().bold(),
    }
}

/// What there is to say of the selected tenant, or what went wrong.
fn draw_detail(frame: &mut Frame<'_>, area: Rect, model: &Model) {
    let text = match (model.problem(), model.selected()) {
        (Some(problem), _) => Line::from(problem.to_owned()).red(),
        (None, None) => Line::from("no tenants; strata run -- COMMAND starts one").dim(),
        (None, Some(row)) if row.notes.is_empty() && row.unmanaged.is_empty() => Line::default(),
        (None, Some(row)) if row.notes.is_empty() => {
            Line::from(format!("{}: not managed: {}", row.name, row.unmanaged)).dim()
        }
        (None, Some(row)) => {
            let notes = crate::failure::printable(&row.notes.join("; "));
            Line::from(format!("{}: {notes}", row.name)).yellow()
        }
    };
    frame.render_widget(Paragraph::new(text), area);
}

#[cfg(test)]
mod tests {
    use super::super::model::Sample;
    use super::*;
    use crate::testing::stats;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use std::time::Instant;

    fn screen(width: u16, height: u16, model: &mut Model) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("terminal");
        terminal.draw(|frame| draw(frame, model)).expect("drawn");
        let buffer = terminal.backend().buffer();
        (0..height)
            .map(|y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>())
            .collect()
    }

    fn model(names: &[&str]) -> Model {
        let mut model = Model::default();
        let tenants = names.iter().map(|name| stats(name)).collect();
        model.add(Sample { at: Instant::now(), tenants });
        model
    }

    #[test]
    fn everything_is_to_be_seen_in_80_by_24() {
        let mut shown = model(&["db", "cache"]);
        let columns = shown.columns();
        assert!(!columns.contains(&Column::Node));
        let lines = screen(80, 24, &mut shown);
        assert!(lines[0].starts_with("strata top: 2 tenants, 1.8G of 2.0G"), "{:?}", lines[0]);
        for column in columns {
            assert!(lines[1].contains(column.title()), "{column:?}: {:?}", lines[1]);
        }
        let db = lines.iter().find(|line| line.starts_with("db ")).expect("a row");
        for text in ["M", "███▋", "91%", "1.0G", "620M", "300M", "900M", "70%", "41.0"] {
            assert!(db.contains(text), "{text}: {db:?}");
        }
        assert!(lines[21].contains("a note"), "{:?}", lines[21]);
        assert!(lines[23].starts_with("q quit"), "{:?}", lines[23]);
    }

    #[test]
    fn long_names_take_the_room_that_there_is() {
        let name = "a-very-long-name-of-a-tenant";
        let lines = screen(120, 24, &mut model(&[name]));
        assert!(lines[2].starts_with(name), "{:?}", lines[2]);
    }

    #[test]
    fn many_tenants_scroll_and_tiny_terminals_do_not_break() {
        let names: Vec<String> = (0..100).map(|n| format!("t{n:03}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut many = model(&names);
        for _ in 0..60 {
            many.select_next();
        }
        let lines = screen(80, 24, &mut many);
        assert!(lines.iter().any(|line| line.starts_with("t060")), "{lines:#?}");
        for (width, height) in [(1, 1), (10, 3), (80, 2), (300, 100)] {
            screen(width, height, &mut many);
        }
        let lines = screen(80, 24, &mut model(&[]));
        assert!(lines[21].contains("no tenants"), "{:?}", lines[21]);
    }

    #[test]
    fn a_problem_is_shown_over_the_last_look() {
        let mut model = model(&["db"]);
        model.set_problem("stratad is gone".into());
        let lines = screen(80, 24, &mut model);
        assert!(lines[21].contains("stratad is gone"));
        assert!(lines[2].starts_with("db"));
    }

    #[test]
    fn bars() {
        assert_eq!(bar(0.0), "    ");
        assert_eq!(bar(1.0), "████");
        assert_eq!(bar(7.0), bar(1.0));
        assert_eq!(bar(0.55), "██▎ ");
    }
}
