//! The `[groups]` table of a configuration file.

use toml::de::{DeTable, DeValue};

use super::values::{text, user_named};
use super::{Reader, Refusal, Value, wrong_type};
use crate::config::User;
use crate::groups::{Group, Members, other_of};

const KEY: &str = "groups";
/// Groups, and entries of one, at most: each is looked at when a tenant is made.
const MOST: usize = 256;
const WANTED: &str = "a list of tenants: [\"web1\", \"build*\", \"alice:db\"]";

impl Reader<'_> {
    pub(super) fn groups(&mut self, whole: &DeTable<'_>) -> Vec<Group> {
        let Some(value) = whole.get(KEY) else { return Vec::new() };
        let Some(table) = value.get_ref().as_table() else {
            self.complain(&value.span(), KEY, wrong_type(value.get_ref(), "a table: [groups]"));
            return Vec::new();
        };
        let mut groups = Vec::new();
        for (key, value) in table {
            let name = key.get_ref().as_ref();
            if let Some(problem) = strata_api::name_problem(name) {
                let refusal = (problem.to_owned(), "choose another name".to_owned());
                self.complain(&key.span(), KEY, refusal);
                continue;
            }
            let members = self.members(name, value, &groups);
            groups.push(Group { name: name.to_owned(), members });
        }
        if groups.len() > MOST {
            let what = format!("{} groups are more than the {MOST} allowed", groups.len());
            self.complain(&value.span(), KEY, (what, "leave some out".into()));
        }
        groups
    }

    fn members(&mut self, name: &str, value: &Value<'_>, before: &[Group]) -> Vec<Members> {
        let array = value.get_ref().as_array().filter(|array| array.len() <= MOST);
        let Some(array) = array else {
            let refusal = match value.get_ref().as_array() {
                Some(_) => (format!("it has more than {MOST} entries"), "write patterns".into()),
                None => wrong_type(value.get_ref(), WANTED),
            };
            self.complain(&value.span(), name, refusal);
            return Vec::new();
        };
        let mut all = Vec::new();
        for element in array.iter() {
            match members(element.get_ref(), self.machine.user_id) {
                Ok(members) => {
                    if let Some(other) = other_of(before, &members) {
                        let what = format!("a tenant could be of the group {other} as well");
                        let todo = "have each tenant be of one group at most".to_owned();
                        self.complain(&element.span(), name, (what, todo));
                    }
                    all.push(members);
                }
                Err(refusal) => self.complain(&element.span(), name, refusal),
            }
        }
        all
    }
}

/// `[USER:]NAME`, or how names begin with a `*` behind it.
fn members(
    value: &DeValue<'_>,
    user_id: fn(&str) -> std::io::Result<Option<u32>>,
) -> Result<Members, Refusal> {
    let text = text(value, "a tenant's name, or how names begin: \"web*\"")?;
    let (user, name) = match text.split_once(':') {
        Some((user, name)) => (user_named(user, user_id)?, name),
        None => (User::root(), text),
    };
    let beginning = name.strip_suffix('*');
    let is_all = beginning == Some("");
    let name = beginning.unwrap_or(name);
    if let Some(problem) = strata_api::name_problem(name).filter(|_| !is_all) {
        return Err((problem.to_owned(), format!("write {WANTED}")));
    }
    Ok(Members { user, name: name.to_owned(), is_beginning: beginning.is_some() })
}
