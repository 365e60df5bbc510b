//! What `top` shows: rows with rates, worked out of two looks, in an order that
//! the user chose. Draws nothing and asks nobody.

use std::cmp::Ordering;
use std::time::Instant;

use strata_api::{AdviceState, Stats, TenantState};

use crate::show::{
    causes, columns, has_node, short_count, short_latency, short_percent, short_size, state_name,
    unmanaged_bytes,
};

/// One look at all tenants.
pub(crate) struct Sample {
    /// When.
    pub(crate) at: Instant,
    /// All of them.
    pub(crate) tenants: Vec<Stats>,
}

/// A column of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Column {
    Name,
    Use,
    Budget,
    Resident,
    /// Only where a tenant has a node tier.
    Node,
    /// Only where the kernel has merged pages of a tenant.
    Merged,
    Compressed,
    Stored,
    Faults,
    Evictions,
    Loss,
    Need,
    Stall,
    P99,
}

impl Column {
    /// From left to right.
    const ALL: [Self; 14] = [
        Self::Name,
        Self::Use,
        Self::Budget,
        Self::Resident,
        Self::Node,
        Self::Merged,
        Self::Compressed,
        Self::Stored,
        Self::Faults,
        Self::Evictions,
        Self::Loss,
        Self::Need,
        Self::Stall,
        Self::P99,
    ];

    /// Its heading.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Name => "NAME",
            Self::Use => "USE",
            Self::Budget => "BUDGET",
            Self::Resident => "RES",
            Self::Node => "NODE",
            Self::Merged => "MERGED",
            Self::Compressed => "COMPR",
            Self::Stored => "STORED",
            Self::Faults => "FLT/s",
            Self::Evictions => "EVI/s",
            Self::Loss => "LOSS",
            Self::Need => "NEED5",
            Self::Stall => "STALL",
            Self::P99 => "P99us",
        }
    }
}

/// One tenant.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) state: TenantState,
    /// What it costs in DRAM, as a part of its budget: 1.0 is all of it.
    pub(crate) budget_use: f64,
    pub(crate) budget_bytes: u64,
    /// In DRAM as it is, managed or not.
    pub(crate) resident_bytes: u64,
    /// In place on the node; none: it has none.
    pub(crate) node_bytes: Option<u64>,
    /// What it does not pay for because others have it too.
    pub(crate) merged_saved_bytes: u64,
    pub(crate) compressed_bytes: u64,
    pub(crate) stored_bytes: u64,
    /// None until there were two looks at it.
    pub(crate) faults_per_s: Option<f64>,
    pub(crate) evictions_per_s: Option<f64>,
    /// What its budget costs it in speed, as far as the advisor can tell.
    pub(crate) loss: Option<f64>,
    /// The budget that would cost it 5 %.
    pub(crate) need_bytes: Option<u64>,
    /// Hundredths of the last ten seconds in which some thread waited for a page.
    pub(crate) stall: f64,
    pub(crate) p99_us: f64,
    /// What is not managed, by cause.
    pub(crate) unmanaged: String,
    pub(crate) notes: Vec<String>,
}

impl Row {
    fn new(now: &Stats, before: Option<(&Stats, f64)>) -> Self {
        // A younger one is another tenant that was given the same name.
        let before = before.filter(|(old, seconds)| {
            *seconds > 0.0 && old.uptime_seconds <= now.uptime_seconds && old.uid == now.uid
        });
        let rate = |counter: fn(&Stats) -> u64| {
            before.map(|(old, seconds)| counter(now).saturating_sub(counter(old)) as f64 / seconds)
        };
        let steady = now.advice.filter(|advice| advice.state == AdviceState::Steady);
        Self {
            name: crate::failure::printable(&now.name),
            state: now.state,
            budget_use: now.dram_bytes() as f64 / now.budget_bytes.max(1) as f64,
            budget_bytes: now.budget_bytes,
            resident_bytes: now.resident_bytes.saturating_add(unmanaged_bytes(now)),
            node_bytes: has_node(now).then_some(now.node_bytes),
            merged_saved_bytes: now.merged_saved_bytes,
            compressed_bytes: now.compressed_bytes,
            stored_bytes: now.stored_bytes,
            faults_per_s: rate(|stats| stats.faults_total),
            evictions_per_s: rate(|stats| stats.evictions_total),
            loss: steady.and_then(|advice| advice.loss),
            need_bytes: steady.and_then(|advice| advice.budget_bytes[1]),
            stall: now.stall.some.avg10,
            p99_us: now.fault_latency_us.p99,
            unmanaged: causes(now),
            notes: now.notes.clone(),
        }
    }

    /// The cell of `column`, as text.
    pub(crate) fn cell(&self, column: Column) -> String {
        let rate = |rate: Option<f64>| rate.map_or("-".into(), short_count);
        match column {
            Column::Name => self.name.clone(),
            Column::Use => format!("{:.0}%", self.budget_use * 100.0),
            Column::Budget => short_size(self.budget_bytes),
            Column::Resident => short_size(self.resident_bytes),
            Column::Node => self.node_bytes.map_or("-".into(), short_size),
            Column::Merged => short_size(self.merged_saved_bytes),
            Column::Compressed => short_size(self.compressed_bytes),
            Column::Stored => short_size(self.stored_bytes),
            Column::Faults => rate(self.faults_per_s),
            Column::Evictions => rate(self.evictions_per_s),
            Column::Loss => self.loss.map_or("-".into(), |loss| format!("{:.1}%", loss * 100.0)),
            Column::Need => self.need_bytes.map_or("-".into(), short_size),
            Column::Stall => short_percent(self.stall),
            Column::P99 => short_latency(self.p99_us),
        }
    }

    fn compare(&self, other: &Self, column: Column) -> Ordering {
        let number = |row: &Self| match column {
            Column::Name => 0.0,
            Column::Use => row.budget_use,
            Column::Budget => row.budget_bytes as f64,
            Column::Resident => row.resident_bytes as f64,
            Column::Node => row.node_bytes.map_or(-1.0, |bytes| bytes as f64),
            Column::Merged => row.merged_saved_bytes as f64,
            Column::Compressed => row.compressed_bytes as f64,
            Column::Stored => row.stored_bytes as f64,
            Column::Faults => row.faults_per_s.unwrap_or(-1.0),
            Column::Evictions => row.evictions_per_s.unwrap_or(-1.0),
            Column::Loss => row.loss.unwrap_or(-1.0),
            Column::Need => row.need_bytes.map_or(-1.0, |bytes| bytes as f64),
            Column::Stall => row.stall,
            Column::P99 => row.p99_us,
        };
        // Numbers from the largest down, names from A on.
        number(other).total_cmp(&number(self)).then_with(|| self.name.cmp(&other.name))
    }
}

/// Everything on the screen.
pub(crate) struct Model {
    last: Option<Sample>,
    rows: Vec<Row>,
    sort: Column,
    reversed: bool,
    /// By name, so that it stays on its tenant when the order changes.
    selected: Option<String>,
    problem: Option<String>,
}

impl Default for Model {
    /// Busiest first.
    fn default() -> Self {
        Self {
            last: None,
            rows: Vec::new(),
            sort: Column::Faults,
            reversed: false,
            selected: None,
            problem: None,
        }
    }
}

impl Model {
    /// Takes a new look.
    pub(crate) fn add(&mut self, sample: Sample) {
        let seconds = self.last.as_ref().map_or(0.0, |last| (sample.at - last.at).as_secs_f64());
        let before = |now: &Stats| {
            let last = self.last.as_ref()?;
            last.tenants
                .iter()
                .find(|old| (&old.name, old.uid) == (&now.name, now.uid))
                .map(|old| (old, seconds))
        };
        self.rows = sample.tenants.iter().map(|now| Row::new(now, before(now))).collect();
        self.last = Some(sample);
        self.problem = None;
        self.sort_rows();
        if self.selected_index().is_none() {
            self.selected = self.rows.first().map(|row| row.name.clone());
        }
    }

    /// What kept the last look from being taken; shown until one is.
    pub(crate) fn set_problem(&mut self, problem: String) {
        self.problem = Some(problem);
    }

    /// See [`Model::set_problem`].
    pub(crate) fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// In the chosen order.
    pub(crate) fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Those that there is something to show in.
    pub(crate) fn columns(&self) -> Vec<Column> {
        let has_node = self.rows.iter().any(|row| row.node_bytes.is_some());
        let has_merged = self.rows.iter().any(|row| row.merged_saved_bytes > 0);
        let shown = |column: &Column| match column {
            Column::Node => has_node,
            Column::Merged => has_merged,
            _ => true,
        };
        Column::ALL.into_iter().filter(shown).collect()
    }

    /// The column that the rows are in order of, and whether the order is turned.
    pub(crate) fn order(&self) -> (Column, bool) {
        (self.sort, self.reversed)
    }

    /// Place of the selected tenant in [`Model::rows`].
    pub(crate) fn selected_index(&self) -> Option<usize> {
        self.rows.iter().position(|row| Some(&row.name) == self.selected.as_ref())
    }

    /// The selected tenant.
    pub(crate) fn selected(&self) -> Option<&Row> {
        self.rows.get(self.selected_index()?)
    }

    fn sort_rows(&mut self) {
        let (column, reversed) = self.order();
        self.rows.sort_by(|a, b| a.compare(b, column));
        if reversed {
            self.rows.reverse();
        }
    }

    pub(crate) fn sort_by_next_column(&mut self) {
        self.sort_by(|at, count| (at + 1) % count);
    }

    pub(crate) fn sort_by_previous_column(&mut self) {
        self.sort_by(|at, count| (at + count - 1) % count);
    }

    fn sort_by(&mut self, step: impl Fn(usize, usize) -> usize) {
        let columns = self.columns();
        let at = columns.iter().position(|column| *column == self.sort).unwrap_or(0);
        self.sort = columns[step(at, columns.len())];
        self.sort_rows();
    }

    pub(crate) fn reverse(&mut self) {
        self.reversed = !self.reversed;
        self.sort_rows();
    }

    pub(crate) fn select_next(&mut self) {
        self.select(|index, count| (index + 1).min(count - 1));
    }

    pub(crate) fn select_previous(&mut self) {
        self.select(|index, _| index.saturating_sub(1));
    }

    fn select(&mut self, step: impl Fn(usize, usize) -> usize) {
        if !self.rows.is_empty() {
            let index = step(self.selected_index().unwrap_or(0), self.rows.len());
            self.selected = Some(self.rows[index].name.clone());
        }
    }

    /// Budgets and DRAM of all together.
    pub(crate) fn totals(&self) -> (u64, u64) {
        let tenants = self.last.as_ref().map_or(&[][..], |sample| &sample.tenants);
        tenants.iter().fold((0, 0), |(budgets, dram), stats| {
            (budgets.saturating_add(stats.budget_bytes), dram.saturating_add(stats.dram_bytes()))
        })
    }

    /// One frame for scripts: a heading, then a line a tenant.
    pub(crate) fn as_text(&self) -> String {
        let mut head = vec!["NAME".to_owned(), "STATE".to_owned()];
        let shown = self.columns();
        head.extend(shown[1..].iter().map(|column| column.title().to_owned()));
        let mut table = vec![head];
        for row in &self.rows {
            let mut cells = vec![row.name.clone(), state_name(row.state).to_owned()];
            cells.extend(shown[1..].iter().map(|column| row.cell(*column)));
            table.push(cells);
        }
        columns(&table, 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::stats;
    use std::time::Duration;

    fn model(looks: &[Vec<Stats>]) -> Model {
        let start = Instant::now();
        let mut model = Model::default();
        for (index, tenants) in looks.iter().enumerate() {
            let at = start + Duration::from_secs(2 * index as u64);
            model.add(Sample { at, tenants: tenants.clone() });
        }
        model
    }

    fn later(name: &str, faults: u64, evictions: u64) -> Stats {
        let mut later = stats(name);
        later.faults_total += faults;
        later.evictions_total += evictions;
        later.uptime_seconds += 2.0;
        later
    }

    #[test]
    fn rates_need_two_looks_at_the_same_tenant() {
        let model = model(&[vec![stats("a"), stats("b")], {
            let mut reborn = later("b", 500, 500);
            reborn.uptime_seconds = 1.0;
            vec![later("a", 300, 50), reborn, stats("new")]
        }]);
        let row = |name: &str| model.rows().iter().find(|row| row.name == name).expect("a row");
        assert_eq!(row("a").faults_per_s, Some(150.0));
        assert_eq!(row("a").evictions_per_s, Some(25.0));
        assert_eq!(row("b").faults_per_s, None);
        assert_eq!(row("new").faults_per_s, None);
        assert_eq!(row("new").cell(Column::Faults), "-");
    }

    #[test]
    fn use_is_all_that_the_budget_bounds() {
        let model = model(&[vec![stats("a")]]);
        // 600 resident, 20 unmanaged, 300 compressed, 8 metadata, of 1024 MiB.
        assert_eq!(model.rows()[0].cell(Column::Use), "91%");
        assert_eq!(model.totals(), (1 << 30, 928 << 20));
    }

    #[test]
    fn rows_are_in_the_chosen_order_and_the_selection_stays() {
        let names = |model: &Model| {
            model.rows().iter().map(|row| row.name.clone()).collect::<Vec<_>>().join("")
        };
        let mut model = model(&[
            vec![stats("a"), stats("b"), stats("c")],
            vec![later("a", 10, 3), later("b", 30, 2), later("c", 20, 1)],
        ]);
        assert_eq!(model.order(), (Column::Faults, false));
        assert_eq!(names(&model), "bca");
        model.select_next();
        // It was on the first tenant of the first look.
        let selected = model.selected().expect("one").name.clone();
        model.reverse();
        assert_eq!(names(&model), "acb");
        assert_eq!(model.selected().expect("one").name, selected);
        model.reverse();
        model.sort_by_next_column();
        assert_eq!(names(&model), "abc");
        for _ in 0..model.columns().len() - 1 {
            model.sort_by_next_column();
        }
        assert_eq!(model.order().0, Column::Faults);
        model.sort_by_previous_column();
        assert_eq!(model.order().0, Column::Stored);
        for _ in 0..5 {
            model.select_next();
        }
        assert_eq!(model.selected_index(), Some(2));
        for _ in 0..5 {
            model.select_previous();
        }
        assert_eq!(model.selected_index(), Some(0));
        // Its tenant ends: another is selected.
        model.add(Sample { at: Instant::now(), tenants: vec![stats("z")] });
        assert_eq!(model.selected().expect("one").name, "z");
        model.add(Sample { at: Instant::now(), tenants: vec![] });
        assert!(model.selected().is_none());
        model.select_next();
    }

    #[test]
    fn a_frame_as_text() {
        let text = model(&[vec![stats("a")], vec![later("a", 300, 50)]]).as_text();
        let words: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words.len(), 2);
        assert_eq!(words[0].len(), words[1].len());
        let at = |title: &str| {
            let column = words[0].iter().position(|word| *word == title).expect(title);
            words[1][column]
        };
        assert_eq!((at("NAME"), at("STATE"), at("USE")), ("a", "managed", "91%"));
        assert_eq!((at("RES"), at("COMPR"), at("STORED")), ("620M", "300M", "900M"));
        assert_eq!(
            (at("FLT/s"), at("EVI/s"), at("STALL"), at("P99us")),
            ("150", "25", "70%", "41.0")
        );
    }
}
